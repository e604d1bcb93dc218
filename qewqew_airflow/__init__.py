"""QewQew for Airflow: stage records into a queue or topic, wait for them, hand one batch to Spark.

The folders are those of Airflow's own providers. Any module may import `arguments`, `errors` and `keys`, which import no other
module of this package. The entry points name `get_provider_info` and `plugin`. Every process of Airflow imports this package and
its folders, so nothing is imported in an ``__init__``.
"""
