"""Batches: their life cycle, their directories and manifests, and reading them, whoever has the queue or reader they are of.

It may import `disk` and `formats`.
"""
