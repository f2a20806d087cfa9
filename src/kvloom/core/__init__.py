"""What every other folder may import: errors, geometry, configuration and plain messages.

Nothing here imports another kvloom folder, and nothing here imports torch, so that the planner
answers from a ``config.json`` alone.
"""
