"""The operators: `stage` records; lease a batch, acknowledge it and return it (`leases`); hand one to Spark (`spark_submit`).

`batch` is what both do who lease one. Only `spark_submit` needs Airflow's Spark provider.
May import `hooks`, `shared`, `assets` and `links`.
"""
