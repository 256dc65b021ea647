"""One file per algorithm: the host half of the kernel of the same name."""
