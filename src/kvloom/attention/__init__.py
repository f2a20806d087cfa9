"""The attention function given to transformers, and the batch object it receives."""
