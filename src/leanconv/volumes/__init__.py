"""Layers of volumes: what arguments are called (`api`), and which of them are layers of images (`images`)."""
