"""The engine: scheduler, runner, sampler, text assembly, and the loop that joins them."""
