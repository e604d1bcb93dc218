"""Batches: their life cycle, their directories and manifests, and how to read them without their queue or reader.

It may import `disk` and `formats`.
"""
