"""The applications for `spark-submit`: `batch.py`, one batch into tables; `drain.py`, all batches under a prefix into one.

May import `data_source`, `source.batches`, `tables` and `options`.
`output` needs no Spark: Airflow checks with it what it is about to submit.
"""
