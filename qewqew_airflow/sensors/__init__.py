"""The sensor, which waits until a queue or a reader of a topic has enough for a batch.

May import `hooks`, `shared`, `links` and `triggers`.
"""
