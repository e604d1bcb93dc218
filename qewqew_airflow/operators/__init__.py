"""The operators: `stage` records; lease, acknowledge and return a batch (`leases`); hand a batch to Spark (`spark_submit`).

`batch` has what the operators that lease share. Only `spark_submit` needs Airflow's Spark provider.
May import `hooks`, `shared`, `assets` and `links`.
"""
