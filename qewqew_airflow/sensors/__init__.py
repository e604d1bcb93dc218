"""The sensor, which waits until a queue or a reader of a topic is worth a batch.

May import `hooks`, `shared`, `links` and `triggers`.
"""
