"""The GPU's memory as the arbiter models it: what fits, what is on the GPU, which pages leave first."""
