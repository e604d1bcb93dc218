"""The message queue provider, by which Airflow's ``MessageQueueTrigger`` finds the trigger.

May import `triggers`.
"""
