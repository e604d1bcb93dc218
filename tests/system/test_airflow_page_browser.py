"""The page in a real Chromium, inside Airflow's own UI, behind a URL prefix. Screenshots go to .cache/screenshots."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from demo.local_airflow import LocalAirflow
from qewqew_core import Message, Queue, Topic
from qewqew_core.limits import LIMITS
from qewqew_core.tools import marker

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, FrameLocator, Page

PREFIX = "/blue/airflow"
ROLES = {"admin": "admin", "vera": "viewer"}
KEY = "flights|manual__2026-01-01T00:00:00+00:00|load|-1"
ACKED = KEY.replace("-1", "4")
MARKUP = "<img src=x onerror=\"document.title='owned'\">"
SCREENSHOTS = Path(__file__).parents[2] / ".cache" / "screenshots"


class ApiServer(LocalAirflow):
    """The API server alone, as it runs behind a proxy that gives it a part of a site."""

    components = {"api-server": ["api-server"]}  # noqa: RUF012

    @property
    def page(self) -> str:
        return f"{self.url}{PREFIX}"

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "AIRFLOW__API__BASE_URL": self.page}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    sync_api.expect.set_options(timeout=180_000)
    with sync_api.sync_playwright() as playwright:
        # Its sandbox does not work as root, and in most containers.
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else [])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "queues"


@pytest.fixture(scope="module")
def server(browser: Browser, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    marker.init(str(directory))
    connections = {"DEFAULT": directory, "TWIN": directory, "ARCHIVE": directory / "not there"}
    env = {
        f"AIRFLOW_CONN_QEWQEW_{name}": json.dumps({"conn_type": "qewqew", "host": str(host)})
        for name, host in connections.items()
    }
    env["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"] = ",".join(f"{name}:{role}" for name, role in ROLES.items())
    with ApiServer(tmp_path_factory.mktemp("airflow"), tmp_path_factory.mktemp("dags"), env) as running:
        yield running


@pytest.fixture(scope="module")
def login(browser: Browser, server: ApiServer) -> Iterator[Callable[[str], BrowserContext]]:
    """``login(name)`` is a browser in which this user has logged in by Airflow's form."""
    contexts: dict[str, BrowserContext] = {}
    passwords = json.loads((server.home / "simple_auth_manager_passwords.json.generated").read_text())

    def make(name: str) -> BrowserContext:
        if name not in contexts:
            contexts[name] = context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
            context.set_default_timeout(180_000)
            page = context.new_page()
            page.goto(server.page + "/")
            page.locator("[name=username]").fill(name)
            page.locator("[name=password]").fill(passwords[name])
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Browse").wait_for()
            page.close()
        return contexts[name]

    yield make
    for context in contexts.values():
        context.close()


@pytest.fixture
def queues(directory: Path) -> Path:
    """The directory with a queue that has a batch of each kind, a hostile queue, and a topic."""
    shutil.rmtree(directory)
    marker.init(str(directory))
    with Queue(directory / "flights", max_attempts=1) as queue:
        queue.put_many([b'{"flight": %d}' % number for number in range(12_345)])
        for number, records in (("1", 1000), ("2", 345)):
            batch = queue.lease(KEY.replace("-1", number), records)
            assert batch is not None
        batch.nack("Path /lake/flights already exists")
        queue._leases.max_attempts = 5
        batch = queue.lease(KEY, 500)
        assert batch is not None
        batch.nack("the worker was restarted")
        done = queue.lease(ACKED, 100)
        assert done is not None
        assert done.id == batch.id  # it was returned
        queue.batch(done.id).ack()
        batch = queue.lease(KEY.replace("-1", "3"), 500)
        assert batch is not None
        batch.nack("the worker was restarted")
    with Queue(directory / f"{MARKUP[:20]}>") as queue:
        queue.put_many([MARKUP.encode(), b"\x00\x01binary", b"x" * 10_000])
    with Topic(directory / "events") as topic, topic.reader("lake"), topic.reader("paid", "order.paid"):
        topic.append_many([Message(b"%d" % number, tag="order.paid" if number % 2 else "order.failed") for number in range(60)])
    return directory


def fail(queues: Path, name: str, *reasons: str) -> list[str]:
    """The ids of dead batches of two records each, of a queue of this name."""
    with Queue(queues / name, max_attempts=1) as queue:
        for number, reason in enumerate(reasons):
            queue.put_many([b"x"] * 2)
            batch = queue.lease(f"{KEY}{number}")
            assert batch is not None
            batch.nack(reason)
        return [batch.id for batch in queue.dead()]


class InAirflow:
    """The page as a user has it in front of him."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frame: FrameLocator = page.frame_locator("iframe")
        self.problems: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text) if "Content Security" in message.text else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))

    def button(self, name: str | re.Pattern[str]) -> Any:
        return self.frame.get_by_role("button", name=name, exact=isinstance(name, str))

    def link(self, name: str) -> Any:
        return self.frame.get_by_role("link", name=name, exact=True)

    def open(self, name: str) -> None:
        """The page of a queue or topic, when it shows the batches."""
        self.link(name).click()
        self.frame.get_by_role("heading", name="Batches", exact=True).wait_for()
        self.frame.get_by_text("Reading the batches").wait_for(state="detached")

    def row(self, name: str) -> list[str]:
        """The texts of the cells of a queue or topic."""
        cells = self.frame.get_by_role("row").filter(has=self.link(name)).get_by_role("cell").all_inner_texts()
        return [text.strip() for text in cells]

    def screenshot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@pytest.fixture
def opened(login: Callable[[str], BrowserContext], server: ApiServer, queues: Path) -> Iterator[Callable[..., InAirflow]]:
    """``opened(user)`` goes there, or by the menu, Browse -> QewQew."""
    pages = []

    def go(user: str = "admin", by_menu: bool = False) -> InAirflow:
        page = login(user).new_page()
        pages.append(InAirflow(page))
        page.goto(f"{server.page}/" if by_menu else f"{server.page}/plugin/qewqew")
        if by_menu:
            page.get_by_role("button", name="Browse").click()
            page.get_by_role("menuitem", name="QewQew").click()
        pages[-1].link("flights").wait_for()
        return pages[-1]

    yield go
    for one in pages:
        one.page.close()
        assert one.problems == []


@pytest.mark.quick("a browser is led to the page, whose numbers follow the queues")
def test_browse_leads_to_the_page_and_its_numbers_follow_the_queues(opened: Callable[..., InAirflow], queues: Path) -> None:
    from playwright.sync_api import expect

    airflow = opened(by_menu=True)
    name, records, size, oldest, _, leased, returned, dead, peek = airflow.row("flights")
    assert (name, records, leased, returned, dead, peek) == ("flights", "10,000", "1", "1", "1", "Peek")
    assert size.endswith("KiB")
    assert re.fullmatch(r"\d+ (s|min)", oldest)
    assert airflow.row("events")[:2] == ["events", "60"]
    assert airflow.row("events")[5:8] == ["2", "60", "0"]
    expect(airflow.frame.get_by_role("img", name=re.compile("^10,000 now"))).to_be_visible()
    # Two connections to one directory count once.
    expect(airflow.link("flights")).to_have_count(1)
    expect(airflow.frame.get_by_role("heading", name="qewqew_default, qewqew_twin")).to_be_visible()
    expect(airflow.frame.get_by_text("2 queues · 1 topic · 1 dead batch")).to_be_visible()
    with Queue(queues / "flights") as queue:
        queue.put_many([b"{}"] * 100)
    airflow.frame.get_by_label("Search queues and topics").focus()
    expect(airflow.frame.get_by_role("cell", name="10,100", exact=True)).to_be_visible()
    expect(airflow.frame.get_by_label("Search queues and topics")).to_be_focused()
    airflow.page.reload()
    expect(airflow.link("flights")).to_be_visible()


def test_what_is_wrong_comes_first_in_a_line_each(opened: Callable[..., InAirflow]) -> None:
    from playwright.sync_api import expect

    airflow = opened()
    wrong = airflow.frame.get_by_role("region", name="What is wrong")
    expect(wrong.locator("summary")).to_have_text(
        [re.compile("^flights.*1 dead.*Path … already exists"), re.compile("Connection qewqew_archive.*broken")]
    )
    expect(airflow.frame.get_by_text("does not exist")).not_to_be_visible()
    assert wrong.bounding_box()["y"] < airflow.link("flights").bounding_box()["y"]
    airflow.frame.get_by_text("Connection qewqew_archive").click()
    expect(airflow.frame.get_by_text("does not exist")).to_be_visible()
    wrong.locator("summary").first.click()
    wrong.get_by_role("link", name="Open flights").click()
    expect(airflow.frame.get_by_role("heading", name="Queue flights")).to_be_visible()


def test_the_list_is_searched_and_sorted(opened: Callable[..., InAirflow], queues: Path) -> None:
    from playwright.sync_api import expect

    with Queue(queues / "a few") as queue:
        queue.put_many([b"x"] * 7)
    airflow = opened()
    names = airflow.frame.get_by_role("table", name="Queues of qewqew_default").locator("td.name")
    hostile = f"{MARKUP[:20]}>"
    expect(names).to_have_text([hostile, "a few", "flights"])
    airflow.frame.get_by_label("Sort by").select_option("records that wait")
    expect(names).to_have_text(["flights", "a few", hostile])
    airflow.frame.get_by_label("Search").fill("FLI")
    expect(names).to_have_text(["flights"])
    expect(airflow.link("events")).to_have_count(0)
    airflow.frame.get_by_label("Search").fill("nothing has this")
    expect(airflow.frame.get_by_text("No queue or topic has this in its name.")).to_be_visible()


# All that is shown lies inside the window, no cell or thing to click lies on another, and no name is narrow.
MEASURE = """() => {
  const width = document.documentElement.clientWidth, wrong = [];
  const shown = selector => [...document.querySelectorAll(selector)].filter(element => element.checkVisibility());
  const what = element => `${element.tagName} ${element.textContent.trim().slice(0, 40)}`;
  const box = element => element.getBoundingClientRect();
  if (document.documentElement.scrollWidth > width) wrong.push(`it scrolls to ${document.documentElement.scrollWidth}`);
  for (const element of shown("header > *, #tools *, main *, dialog[open] *")) {
    if (element.closest("pre, svg, option, thead")) continue;
    const { left, right } = box(element);
    if (left < -1 || right > width + 1) wrong.push(`outside: ${what(element)} ${left} to ${right}`);
    if (element.matches("td") && element.scrollWidth > element.clientWidth + 1) wrong.push(`cut off: ${what(element)}`);
  }
  for (const element of shown("td.name")) if (box(element).width < 90) wrong.push(`narrow: ${what(element)}`);
  const overlap = elements => elements.forEach((first, place) => elements.slice(place + 1).forEach(second => {
    const [a, b] = [box(first), box(second)];
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1) {
      wrong.push(`${what(first)} lies on ${what(second)}`);
    }
  }));
  overlap(shown("main a, main button, #tools input, #tools select, summary"));
  for (const row of shown("tbody tr")) overlap([...row.children].filter(cell => cell.checkVisibility()));
  return wrong;
}"""
PAGES = {
    "list": "",
    "queue": "?connection=qewqew_default&queue=flights",
    "causes": "?connection=qewqew_default&queue=failing",
    "topic": "?connection=qewqew_twin&topic=events",
}


@pytest.mark.parametrize("width", [360, 390, 600, 768, 920, 1280, 1920])
@pytest.mark.parametrize("place", PAGES)
def test_nothing_is_cut_off_or_on_something_else_at_any_width(
    width: int, place: str, opened: Callable[..., InAirflow], server: ApiServer, queues: Path
) -> None:
    reason = "/a/path/that/cannot/be/broken/anywhere/" + "x" * 60
    with Queue(queues / ("a-name-without-any-space-" + "n" * 120), max_attempts=1) as queue:
        queue.put_many([b"x"] * 123_456)
        batch = queue.lease(KEY, 99_999)
        assert batch is not None
        batch.nack(reason)
    with Topic(queues / "events") as topic, topic.reader("lake") as reader:
        batch = reader.lease(KEY, 10)
        assert batch is not None
    fail(queues, "failing", *(f"{reason}/{number}: " + "it is there. " * 20 for number in range(12)), "no table")
    airflow = opened()
    page = airflow.page
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(f"{server.page}/qewqew/page{PAGES[place]}")
        page.locator("#status").filter(has_text="Updated").wait_for()
        assert page.evaluate(MEASURE) == []
        if place == "causes":
            page.get_by_text("Show 12 batches").click()
            assert page.evaluate(MEASURE) == []
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"page-{place}-{width}-{scheme}.png", full_page=True)
    # Every action can be reached: it is scrolled to, not covered, and inside the window.
    buttons = page.locator("main button")
    for button in buttons.all():
        button.click(trial=True)
    actions = {
        "queue": ["Peek batch", "Return batch", "Put back batch", "Drop batch"],
        "causes": ["Return all 12", "Drop all 12"],
    }
    if place in actions:
        for action in actions[place]:
            page.get_by_role("button", name=re.compile(f"^{action}")).first.click()
            page.locator("dialog[open]").wait_for()
            assert page.evaluate(MEASURE) == []
            page.keyboard.press("Escape")
    if place != "list":  # inside Airflow there is less room
        page.goto(f"{server.page}/plugin/qewqew{PAGES[place]}")
        airflow.frame.locator("#status").filter(has_text="Updated").wait_for()
        frame = next(frame for frame in page.frames if "/qewqew/page?" in frame.url and frame.parent_frame)
        assert frame.evaluate(MEASURE) == []


def test_a_queue_has_a_plot_with_values_of_each_minute(opened: Callable[..., InAirflow], server: ApiServer, queues: Path) -> None:
    from playwright.sync_api import expect

    from qewqew_airflow.page.samples import Samples, Seen

    samples = Samples(str(server.home / "qewqew" / "page.sqlite3"))
    now = int(time.time()) // 60 - 1
    for minute in range(now - 200, now):
        at = minute * 60_000
        depth = 1000 + 10 * (minute % 60)
        samples.add(str(queues), minute, at, [Seen("queue flights", depth, leased=((at, 600),) if minute % 60 == 0 else ())])
    airflow = opened()
    airflow.open("flights")
    plot = airflow.frame.get_by_role("img", name=re.compile("^Plot: Records that wait from"))
    expect(plot.locator("path.depth")).to_have_attribute("d", re.compile("^M.*L"))
    expect(plot.locator("text.title")).to_have_text(["Records that wait", "Records per minute"])
    ticks = [text or "" for text in plot.locator("text.tick.y").all_text_contents()]
    assert ticks[:5] == sorted(ticks[:5], key=lambda text: float(text.replace(",", "")))
    plot.focus()
    for _ in range(5):  # the newest is of the server, which may have come before the samples above
        airflow.page.keyboard.press("ArrowLeft")
    values = airflow.frame.locator("#plot-values")
    expect(values).to_have_text(re.compile(r"[\d,]+ waiting · [\d,.]+ put/min · [\d,.]+ drained/min"))
    expect(plot).to_be_focused()
    airflow.button("1 hour").click()
    expect(airflow.button("1 hour")).to_have_attribute("aria-pressed", "true")
    box = plot.bounding_box()
    assert box is not None
    for part in (0.3, 0.9):
        airflow.page.mouse.move(box["x"] + box["width"] * part, box["y"] + 60)
        expect(values).to_have_text(re.compile(r"1,\d\d0 waiting · 10 put/min · 0 drained|waiting · 10 put/min · 600 drained"))
    airflow.screenshot("page-plot")


def test_the_batches_of_a_queue_are_shown_as_long_as_they_are_remembered(opened: Callable[..., InAirflow]) -> None:
    from playwright.sync_api import expect

    airflow = opened()
    airflow.open("flights")
    states = airflow.frame.get_by_role("table", name="Batches of flights").locator("td .badge")
    expect(states).to_have_text(["leased", "returned", "done"])
    dead = airflow.frame.get_by_role("region", name="Dead batches")
    expect(dead.get_by_text("Path /lake/flights already exists")).to_be_visible()
    expect(dead.locator("tbody tr")).to_have_count(1)
    assert dead.bounding_box()["y"] < airflow.frame.get_by_role("heading", name="How it was").bounding_box()["y"]
    airflow.screenshot("page-light")
    airflow.link("← All queues").click()
    expect(airflow.link("flights")).to_be_visible()
    airflow.page.reload()
    expect(airflow.link("events")).to_be_visible()
    airflow.open("events")
    expect(airflow.frame.get_by_role("cell", name="order.paid")).to_be_visible()


def test_a_name_is_text_on_its_own_page_too(opened: Callable[..., InAirflow]) -> None:
    from playwright.sync_api import expect

    airflow = opened()
    name = f"{MARKUP[:20]}>"
    airflow.open(name)
    expect(airflow.frame.get_by_role("heading", name=f"Queue {name}")).to_be_visible()
    assert airflow.frame.locator("img").count() == 0
    assert airflow.page.title() != "owned"


def test_records_are_shown_as_text_whatever_is_in_them(opened: Callable[..., InAirflow]) -> None:
    from playwright.sync_api import expect

    airflow = opened()
    airflow.button(f"Peek at the queue {MARKUP[:20]}>").click()
    dialog = airflow.frame.get_by_role("dialog")
    items = dialog.get_by_role("listitem")
    expect(items).to_have_count(3)
    expect(items.nth(0)).to_contain_text(MARKUP)
    expect(items.nth(1)).to_contain_text("00 01 62 69")
    expect(items.nth(2)).to_contain_text("cut")
    assert airflow.frame.locator("img").count() == 0
    airflow.screenshot("page-peek")
    airflow.page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    airflow.button("Peek at the topic events").click()
    expect(items.first).to_contain_text("#0")
    airflow.button("Newest").click()
    expect(items.last).to_contain_text("#59")
    airflow.button("Next for paid").click()
    expect(items.nth(1)).to_contain_text("#3")
    assert airflow.page.title() != "owned"


def test_a_dead_batch_is_dropped_after_a_confirmation_and_not_while_the_queue_is_locked(
    opened: Callable[..., InAirflow], queues: Path
) -> None:
    from playwright.sync_api import expect

    airflow = opened()
    airflow.open("flights")
    drop, confirm = airflow.button(re.compile("^Drop batch")), airflow.frame.get_by_role("alertdialog")
    drop.click()
    expect(confirm).to_contain_text("Drop 345 records?")
    expect(airflow.button("Cancel")).to_be_focused()
    airflow.screenshot("page-drop")
    airflow.page.keyboard.press("Enter")
    expect(confirm).to_have_count(0)
    with Queue(queues / "flights") as queue:
        assert len(queue.dead()) == 1
        drop.click()
        airflow.button("Drop permanently").click()
        expect(confirm.get_by_role("alert")).to_contain_text("Locked")
        assert len(queue.dead()) == 1
    airflow.button("Drop permanently").click()
    answers = airflow.frame.locator("#toast, #confirm-error").filter(has_text=re.compile("[a-z]"))
    expect(answers).to_have_text(re.compile("^Dropped: batch"))  # if it fails, it shows what the dialog says
    expect(confirm).to_have_count(0)
    expect(drop).to_have_count(0)
    with Queue(queues / "flights") as queue:
        assert queue.dead() == []
        assert len(queue.batches()) == 2


def test_dead_batches_of_one_cause_are_one_row_and_are_returned_or_dropped_together(
    opened: Callable[..., InAirflow], server: ApiServer, queues: Path
) -> None:
    from playwright.sync_api import expect

    ids = fail(queues, "failing", *(f"Path /lake/{number} is there" for number in range(60)), *["no table"] * 2, "no luck")
    airflow = opened()
    summary = airflow.frame.get_by_role("region", name="What is wrong").locator("summary").filter(has_text="failing")
    expect(summary).to_have_text(re.compile("63 dead.*Path … is there · 2 other causes"))
    airflow.open("failing")
    dead, confirm = airflow.frame.get_by_role("region", name="Dead batches"), airflow.frame.get_by_role("alertdialog")
    expect(dead.get_by_role("heading")).to_have_text("63 dead batches of 3 causes")
    expect(dead.locator("article > p")).to_have_text(
        ["Path … is there", *[f"attempt 1 of 1: no {what}" for what in ("table", "luck")]]
    )
    expect(dead.locator("tr:visible", has=airflow.frame.locator("td"))).to_have_count(1)  # a single one is unfolded
    dead.get_by_text("Show 60 batches").click()
    expect(dead.get_by_text("Path /lake/59 is there")).to_be_visible()
    airflow.screenshot("page-causes")
    airflow.button("Return all 60 dead batches: Path … is there").click()
    expect(confirm).to_contain_text("Return all 60 batches with 120 records?")
    with Queue(queues / "failing") as queue:
        queue.batch(ids[7]).return_to_queue()  # it has changed since it was shown
        airflow.frame.locator("#confirm-do").click()
        expect(confirm.get_by_role("alert")).to_contain_text("Locked")
    airflow.frame.locator("#confirm-do").click()
    expect(airflow.frame.locator("#toast")).to_have_text("Returned: 59 batches. Changed meanwhile, so left alone: 1.")
    expect(dead.get_by_role("heading")).to_have_text("3 dead batches of 2 causes")
    airflow.button("Drop all 2 dead batches: attempt 1 of 1: no table").click()
    airflow.button("Drop permanently").click()
    expect(airflow.frame.locator("#toast")).to_have_text("Dropped: 2 batches.")
    expect(dead.get_by_role("heading")).to_have_text("1 dead batch")
    with Queue(queues / "failing") as queue:
        assert [batch.id for batch in queue.dead()] == ids[62:]
        assert {batch.id for batch in queue.batches()} == set(ids[:60])


def test_a_link_to_a_dead_batch_unfolds_those_of_its_cause(
    opened: Callable[..., InAirflow], server: ApiServer, queues: Path
) -> None:
    from playwright.sync_api import expect

    ids = fail(queues, "failing", *["no table"] * 30)
    airflow = opened()
    airflow.page.goto(f"{server.page}/plugin/qewqew?connection=qewqew_default&queue=failing&batch={ids[3]}")
    expect(airflow.frame.locator("tr.sought")).to_be_in_viewport()
    expect(airflow.frame.locator("tr.sought")).to_contain_text(ids[3])


def test_a_viewer_sees_numbers_and_can_do_nothing(opened: Callable[..., InAirflow]) -> None:
    airflow = opened("vera")
    assert airflow.row("flights")[1] == "10,000"
    airflow.open("flights")
    airflow.frame.get_by_text("of a DAG that you may not see").first.wait_for()
    assert airflow.button(re.compile("Peek|Drop|Return|Put back")).count() == 0


def test_a_batch_that_was_leased_by_hand_days_ago_is_stuck_and_is_returned(
    opened: Callable[..., InAirflow], queues: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import expect

    with monkeypatch.context() as ago:
        ago.setattr(LIMITS, "clock", lambda: time.time_ns() - 2 * 86_400 * 10**9)
        with Queue(queues / "by hand") as queue:
            queue.put(b"x")
            queue.lease("a program that was killed")
    airflow = opened()
    wrong = airflow.frame.get_by_role("region", name="What is wrong")
    expect(wrong.locator("summary").filter(has_text="by hand")).to_contain_text("1 stuck")
    airflow.open("by hand")
    expect(airflow.frame.get_by_text("Does it still work on the batch?")).to_contain_text("a program that was killed")
    airflow.button(re.compile("^Return batch")).click()
    expect(airflow.frame.get_by_text("first make sure that nobody works on it any more")).to_be_visible()
    airflow.button("Return").click()
    expect(airflow.frame.get_by_text("its owner was overdue")).to_be_visible()


def test_the_owner_of_a_batch_is_linked_to_airflows_page_of_the_task(opened: Callable[..., InAirflow], server: ApiServer) -> None:
    airflow = opened()
    airflow.open("flights")
    airflow.frame.get_by_role("link", name="flights / load [1]", exact=True).click()
    airflow.page.wait_for_url(f"{server.page}/dags/flights/runs/manual__2026-01-01T00%3A00%3A00%2B00%3A00/tasks/load/mapped/1")


def test_the_page_is_dark_when_airflow_is(opened: Callable[..., InAirflow], server: ApiServer) -> None:
    from playwright.sync_api import expect

    airflow = opened()
    root = airflow.frame.locator("html")
    expect(root).to_have_css("color-scheme", "light")
    airflow.page.get_by_role("button", name="User").click()
    airflow.page.get_by_text("Appearance").click()
    airflow.page.get_by_text("Dark Mode").click()
    expect(root).to_have_css("color-scheme", "dark")
    around = airflow.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    expect(airflow.frame.locator("body")).to_have_css("background-color", around)
    airflow.open("flights")
    airflow.screenshot("page-dark")
    airflow.page.goto(f"{server.page}/qewqew/page")  # without Airflow around it, the system's theme counts
    expect(airflow.page.locator("html")).to_have_css("color-scheme", "light dark")
    airflow.page.evaluate("localStorage.removeItem('theme')")


def test_the_link_of_a_task_leads_to_its_batch_in_airflows_frame_also_an_acknowledged_one(
    opened: Callable[..., InAirflow], server: ApiServer
) -> None:
    from playwright.sync_api import expect

    from qewqew_airflow.links.qewqew import QewQewLink
    from qewqew_airflow.operators.leases import QewQewLeaseOperator

    dag, run, task, index = ACKED.split("|")
    ti_key = SimpleNamespace(dag_id=dag, run_id=run, task_id=task, map_index=int(index))
    link = QewQewLink().get_link(QewQewLeaseOperator(task_id=task, queue_name="flights"), ti_key=ti_key)
    airflow = opened()
    airflow.page.goto(f"{server.page}/{link}")
    sought = airflow.frame.locator("tr.sought")
    expect(sought).to_contain_text("flights / load [4]")
    expect(sought).to_contain_text("done")
    airflow.page.reload()
    expect(sought).to_contain_text("flights / load [4]")
    airflow.link("← All queues").click()
    expect(airflow.link("events")).to_be_visible()
