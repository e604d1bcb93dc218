"""QewQew for Spark: the data source `qewqew` (see `source`) and the batch job (see `jobs.batch`).

Importing this package costs nothing: Spark and Arrow are imported where they are used.
"""
