"""The native step: a recognised decoder's whole forward pass in one call into C++ (docs/native-step.md)."""
