"""What works on queues and topics from outside: dump, export and import, replay, listing, the files of .NET's DiskQueue.

It may import all of the core but `cli`.
"""
