"""What `df.write` and `df.writeStream` do: rows become records or messages, are staged, and are committed at once.

May import `source.rows`, which says what the columns are, and `options`.
"""
