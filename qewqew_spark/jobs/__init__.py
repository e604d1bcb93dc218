"""The application for `spark-submit`, `batch.py`: the records of a batch, the tables they go to, and the quarantine.

May import `data_source`, `tables` and `options`. `output` needs no Spark: Airflow checks with it what it is about to submit.
"""
