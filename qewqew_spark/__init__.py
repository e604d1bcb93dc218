"""QewQew for Spark. `data_source` has the format `qewqew`, which joins `source` (reads) and `sink` (writes); `jobs.batch` is the
application that makes tables of a batch; `options`, which imports nothing of this package, is for all of them.

Importing this package costs nothing: Spark and Arrow are imported where they are used.
"""
