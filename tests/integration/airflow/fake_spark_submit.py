"""Stands in for spark-submit: writes down what it was given, then does what the test says next.

``$FAKE_SPARK/next`` holds the names of actions, one a line, of which each call takes the first:

    fail       ends like a job that failed, with the ready-made job's last line
    error      ends like a Python program that raised
    kill       kills the task's process, as the loss of the worker would, and stays
    terminate  tells it to stop, as Airflow does when a user says so, and stays
    stay       stays, as a job that takes long
    wait       succeeds as soon as there is a file ``$FAKE_SPARK/go``
    (none)     succeeds

Every call is a line of JSON in ``$FAKE_SPARK/calls``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from qewqew_core import Message, Queue, Topic, inspect, inspect_reader
from qewqew_core.batch import manifest, segments

home = os.environ["FAKE_SPARK"]
arguments = sys.argv[1:]
application = next(number for number, argument in enumerate(arguments) if argument.endswith(".py"))
given = arguments[application + 1 :]
path = given[0]
body = manifest.load(path)
directory = os.path.dirname(path)
beside = os.path.dirname(os.path.dirname(directory))

records = []
for segment in body.segments:
    for some in segments.read_records(directory, body, segment):
        records += [(one.body if isinstance(one, Message) else one).decode() for one in some]
if body.reader is None:
    queue = os.path.join(beside, body.queue)
    stats = inspect(queue)
    with Queue(queue, lock_timeout=1):  # raises if the task holds the queue while Spark runs
        pass
else:
    stats = inspect_reader(os.path.dirname(beside), body.reader)
    with Topic(os.path.dirname(beside), lock_timeout=1) as topic, topic.reader(body.reader):
        topic.append_many([])  # likewise
call = {
    "pid": os.getpid(),
    "id": body.id,
    "attempt": body.attempt,
    "records": records,
    "leased": stats.leased,
    "returned": stats.returned,
    "options": arguments[:application],
    "application": arguments[application],
    "arguments": given,
    "python": os.environ.get("PYSPARK_PYTHON"),
}
with open(os.path.join(home, "calls"), "a") as file:
    file.write(json.dumps(call) + "\n")

with open(os.path.join(home, "next")) as file:
    action, *rest = file.read().split() or [""]
with open(os.path.join(home, "next"), "w") as file:
    file.write("\n".join(rest))

if action == "fail":
    print("WARN something that does not matter")
    print("qewqew: error: 3 of 3 records do not decode, max_bad_records is 0")
    print("INFO ShutdownHookManager: shutdown hook called")
    sys.exit(1)
if action == "error":
    raise ValueError("the disk of the executor is full")
if action == "kill":
    os.kill(os.getppid(), signal.SIGKILL)
if action == "terminate":
    os.kill(os.getppid(), signal.SIGTERM)
if action in ("kill", "terminate", "stay"):
    time.sleep(60)
while action == "wait" and not os.path.exists(os.path.join(home, "go")):
    time.sleep(0.02)
if "--result" in given:
    with open(given[given.index("--result") + 1], "w") as file:
        json.dump({"batch": body.id, "attempt": body.attempt, "read": len(records), "good": len(records), "bad": 0}, file)
