"""Tools that work on queues and topics from outside: which a path is, put, tail, dump, export, replay, DiskQueue's files;
and what submitting a job to Spark needs.

It may import all of the core but `cli`.
"""
