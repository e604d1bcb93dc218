"""The operators: `stage` records; lease, acknowledge and return a batch (`leases`); `process` it in the task, `publish` it, or
hand it to Spark (`spark_submit`); append what was published to a table (`drain`).

`batch` has what the operators that lease share, `spark_operator` what those share that submit to Spark. Only these need
Airflow's Spark provider.
May import `hooks`, `shared`, `assets` and `links`.
"""
