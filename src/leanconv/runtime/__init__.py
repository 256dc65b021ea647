"""Everything between a plan and the GPU: arrays, compilation, the disk cache, launches, environment variables."""
