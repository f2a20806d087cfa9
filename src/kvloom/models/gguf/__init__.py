"""GGUF files: read, and converted once to a directory of bf16 safetensors.

``header`` parses a file, ``architectures`` names its tensors and configuration in transformers'
words, ``tokenizer`` rebuilds its tokenizer, ``convert`` writes the directory.
"""
