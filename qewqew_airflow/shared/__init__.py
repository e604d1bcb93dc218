"""What several folders need: the source of a batch and when it is ready, records as bytes, metrics and lineage.

May import `hooks`.
"""
