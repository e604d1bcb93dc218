"""QewQew for Airflow: stage records into a queue or topic, wait for them, hand one batch to Spark.

Every process of Airflow imports this package, so nothing is imported here; take the classes from
`hooks`, `operators`, `sensors` and `spark_submit` (only the last needs Airflow's Spark provider).
"""
