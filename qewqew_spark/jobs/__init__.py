"""Applications for `spark-submit`."""
