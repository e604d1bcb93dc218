"""The page in a real Chromium, inside Airflow's own UI, behind a URL prefix. Screenshots go to .cache/screenshots."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from demo.local_airflow import LocalAirflow
from qewqew_core import Message, Queue, Topic

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, FrameLocator, Page

PREFIX = "/blue/airflow"
ROLES = {"admin": "admin", "vera": "viewer"}
KEY = "flights|manual__2026-01-01T00:00:00+00:00|load|-1"
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
    directory.mkdir()
    connections = {"DEFAULT": directory, "ARCHIVE": directory / "not there"}
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
    """The directory with a queue that has a dead, a leased and a returned batch, a hostile queue, and a topic."""
    shutil.rmtree(directory)
    directory.mkdir()
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
    with Queue(directory / f"{MARKUP[:20]}>") as queue:
        queue.put_many([MARKUP.encode(), b"\x00\x01binary", b"x" * 10_000])
    with Topic(directory / "events") as topic, topic.reader("lake"), topic.reader("paid", "order.paid"):
        topic.append_many([Message(b"%d" % number, tag="order.paid" if number % 2 else "order.failed") for number in range(60)])
    return directory


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

    def row(self, name: str) -> list[str]:
        """The texts of the cells of a queue or topic."""
        cells = self.frame.get_by_role("row").filter(has=self.button(name)).get_by_role("cell").all_inner_texts()
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
        pages[-1].button("flights").wait_for()
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
    assert (name, records, leased, returned, dead, peek) == ("flights", "10,500", "1", "1", "1", "Peek")
    assert size.endswith("KiB")
    assert re.fullmatch(r"\d+ (s|min)", oldest)
    assert airflow.row("events")[:2] == ["events", "60"]
    assert airflow.row("events")[5:8] == ["2", "60", "0"]
    expect(airflow.frame.get_by_role("alert")).to_contain_text("does not exist")  # of the other connection
    expect(airflow.frame.get_by_role("img", name=re.compile("^10,500 now"))).to_be_visible()

    airflow.button("flights").focus()
    airflow.page.keyboard.press("Enter")
    expect(airflow.frame.get_by_text("Path /lake/flights already exists")).to_be_visible()
    airflow.button("events").click()
    expect(airflow.frame.get_by_role("cell", name="order.paid")).to_be_visible()
    airflow.button("flights").focus()
    airflow.screenshot("page-light")
    with Queue(queues / "flights") as queue:
        queue.put_many([b"{}"] * 100)
    expect(airflow.frame.get_by_role("cell", name="10,600", exact=True)).to_be_visible()
    expect(airflow.button("flights")).to_be_focused()
    expect(airflow.button("flights")).to_have_attribute("aria-expanded", "true")

    airflow.page.reload()
    expect(airflow.button("flights")).to_be_visible()


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
    airflow.button("flights").click()
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
        airflow.button("Drop for ever").click()
        expect(confirm.get_by_role("alert")).to_contain_text("Locked")
        assert len(queue.dead()) == 1
    airflow.button("Drop for ever").click()
    answers = airflow.frame.locator("#toast, #confirm-error").filter(has_text=re.compile("[a-z]"))
    expect(answers).to_have_text(re.compile("^Dropped: batch"))  # if it fails, it shows what the dialog says
    expect(confirm).to_have_count(0)
    expect(drop).to_have_count(0)
    with Queue(queues / "flights") as queue:
        assert queue.dead() == []
        assert len(queue.batches()) == 2


def test_a_viewer_sees_numbers_and_can_do_nothing(opened: Callable[..., InAirflow]) -> None:
    airflow = opened("vera")
    assert airflow.row("flights")[1] == "10,500"
    airflow.button("flights").click()
    airflow.frame.get_by_text("of a DAG that you may not see").first.wait_for()
    assert airflow.button(re.compile("Peek|Drop|Return|Put back")).count() == 0


def test_the_owner_of_a_batch_is_linked_to_airflows_page_of_the_task(opened: Callable[..., InAirflow], server: ApiServer) -> None:
    airflow = opened()
    airflow.button("flights").click()
    airflow.frame.get_by_role("link", name="flights / load", exact=True).click()
    airflow.page.wait_for_url(f"{server.page}/dags/flights/runs/manual__2026-01-01T00%3A00%3A00%2B00%3A00/tasks/load")


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
    airflow.button("flights").click()
    airflow.button("events").click()
    airflow.screenshot("page-dark")
    airflow.page.goto(f"{server.page}/qewqew/page")  # without Airflow around it, the system's theme counts
    expect(airflow.page.locator("html")).to_have_css("color-scheme", "light dark")
    airflow.page.evaluate("localStorage.removeItem('theme')")


def test_the_link_of_a_task_shows_the_details_of_its_queue(opened: Callable[..., InAirflow], server: ApiServer) -> None:
    from playwright.sync_api import expect

    page = opened().page
    page.goto(f"{server.page}/qewqew/page?connection=qewqew_default&name=events")
    expect(page.get_by_role("button", name="events", exact=True)).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("button", name="flights", exact=True)).to_have_attribute("aria-expanded", "false")
