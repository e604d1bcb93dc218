"""The message queue provider, through which Airflow's ``MessageQueueTrigger`` finds the trigger.

May import `triggers`.
"""
