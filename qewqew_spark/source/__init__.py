"""What `spark.read` and `spark.readStream` do: batches, queues, topics and the stream, as partitions of Arrow rows.

May import `codecs`, for the typed read, and `options`.
"""
