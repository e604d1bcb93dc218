"""What a request asks for, and whether it comes from our page."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from airflow.configuration import conf
from fastapi import HTTPException, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_core import BadArgument
from qewqew_core.topic.topic_paths import check_reader_name, stem_of

CUSTOM_HEADER = "X-QewQew"  # forms of other sites cannot send it, and scripts only with permission
LARGEST_REQUEST = 10_000  # bytes of its body
MOST_AT_ONCE = 50  # batches, so that a request is not too large and is done in time; the page sends several


class Place(BaseModel):
    """A queue, or a topic with or without one of its readers."""

    model_config = ConfigDict(extra="forbid")

    queue: str | None = None
    topic: str | None = None
    reader: str | None = None

    def path(self, hook: QewQewHook) -> str:
        """Raises `BadArgument`, `BadPath`."""
        if (self.queue is None) == (self.topic is None) or (self.topic is None and self.reader is not None):
            raise BadArgument("name a queue, or a topic and perhaps its reader")
        if self.reader is not None:
            check_reader_name(self.reader)
        return hook.path(self.queue if self.queue is not None else self.topic)  # type: ignore[arg-type]

    def stem(self, path: str) -> str:
        """The beginning of the paths of its batches."""
        return path if self.reader is None else stem_of(path, self.reader)


class Asked(Place):
    hours: Annotated[int, Query(ge=1, le=14 * 24)] = 24


class Peek(Place):
    batch: str | None = None
    start: Annotated[int, Query(ge=0)] | None = None  # number of a message
    number: Annotated[int, Query(ge=1, le=100)] = 20


class Shown(BaseModel):
    """A batch as the user saw it. If it has changed since, nothing is done to it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    batch: str
    attempt: int
    made: int


class Act(Place, Shown):
    state: Literal["dead", "leased", "returned"] = "dead"


class ActOnAll(Place):
    """Dead batches, such as all of one cause."""

    model_config = ConfigDict(extra="forbid", strict=True)

    batches: Annotated[list[Shown], Field(min_length=1, max_length=MOST_AT_ONCE)]


Body = TypeVar("Body", Act, ActOnAll)


async def act_of(request: Request) -> Act:
    return await _body(request, Act, "a batch with attempt and made")


async def act_on_all_of(request: Request) -> ActOnAll:
    return await _body(request, ActOnAll, f"1 to {MOST_AT_ONCE} batches, each with attempt and made")


async def _body(request: Request, kind: type[Body], what: str) -> Body:
    """The request of our page. Raises 403 if another site may have sent it with the user's cookie."""
    if CUSTOM_HEADER not in request.headers or request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        raise HTTPException(403, "this request does not come from the page")
    origin = request.headers.get("Origin")
    ours = {request.headers.get("Host"), urlsplit(conf.get("api", "base_url", fallback="") or "").netloc}
    if origin is not None and urlsplit(origin).netloc not in ours - {None, ""}:
        raise HTTPException(403, "this request comes from another site; behind a proxy, [api] base_url must be what browsers use")
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the request must be JSON")
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError:
        raise HTTPException(422, f"the request must name a queue, or a topic and reader, and {what}") from None
