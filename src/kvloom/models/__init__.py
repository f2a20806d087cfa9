"""Models: where they come from, how they are checked and loaded, and which families are served."""
