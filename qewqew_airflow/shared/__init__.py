"""What several folders share: the source of a batch and when it is ready, records as bytes, metrics, lineage.

May import `hooks`.
"""
