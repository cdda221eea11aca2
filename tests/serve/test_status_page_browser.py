"""The status page in a browser: Debian's Chromium, without a screen, driven by playwright."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from playwright import sync_api

from tokenspeed_jax.serve.config import ServerConfig

from .conftest import listening
from .fake_engine import FakeEngine
from .test_lifecycle import eventually

pytestmark = pytest.mark.browser

PHONE = {"width": 375, "height": 700}
LAYOUT_SHIFT = """() => new Promise((resolve) => {
  let sum = 0;
  new PerformanceObserver((list) => { for (const entry of list.getEntries()) sum += entry.value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve(sum), 300);
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    if path is None:
        pytest.fail("these tests need Chromium: apt-get install chromium-headless-shell")
    with sync_api.sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root, as which CI runs; all that it loads here is our own page.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page, and what it did that it should not.

    Attributes:
        complaints: errors of scripts, of the console and of the policy.
        strangers: requests to other hosts.
    """

    page: sync_api.Page
    complaints: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def waits_for(self, selector: str, text: str) -> None:
        sync_api.expect(self.page.locator(selector)).to_contain_text(text, timeout=20_000)


Open = Callable[..., Visit]


@pytest.fixture
def open_page(browser: sync_api.Browser) -> Iterator[Open]:
    """`open_page(address)`: the page in a context of its own; further arguments go to the context."""
    contexts = []

    def visit(address: tuple[str, int], **options: object) -> Visit:
        context = browser.new_context(**options)  # pyright: ignore[reportArgumentType]
        contexts.append(context)
        page = context.new_page()
        made = Visit(page)
        origin = f"http://{address[0]}:{address[1]}/"
        page.on("console", lambda message: made.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: made.complaints.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(origin) else made.strangers.append(sent.url))
        page.goto(origin)
        return made

    yield visit
    for context in contexts:
        context.close()


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark", "viewport": PHONE}], ids=["desktop", "dark phone"])
def test_the_page_shows_the_engine(address: tuple[str, int], open_page: Open, options: dict[str, object]) -> None:
    visit = open_page(address, **options)
    visit.waits_for("#state", "Ready")
    assert visit.text("h1") == "fake/model"
    assert "16 parents of 256 bytes" in visit.text("#memory-aside")
    assert visit.text("#memory-groups").split() == ["layers.full", "64", "1", "256", "tokens"]
    assert visit.text("#pool-groups").split() == ["layers.full", "4", "2"]
    assert "10 of 16 parents free" in visit.text("#pool-aside")
    picture = visit.page.get_attribute("#pool", "aria-label")
    assert picture == "16 parent blocks: layers.full 4 in use, 2 cached; 10 free"
    visit.waits_for("#chart-samples .values", "running")
    assert visit.page.locator(".plot svg").count() == 8
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    assert visit.page.evaluate(LAYOUT_SHIFT) < 0.02
    assert (visit.complaints, visit.strangers) == ([], [])


def test_a_prompt_streams_and_the_keyboard_is_enough(
    address: tuple[str, int], open_page: Open, engine: FakeEngine
) -> None:
    engine.allow(5)
    visit = open_page(address)
    visit.waits_for("#state", "Ready")
    visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")  # the link that skips to the prompt
    visit.page.keyboard.press("Tab")
    sync_api.expect(visit.page.locator("#max-tokens")).to_be_focused()
    visit.page.keyboard.press("Shift+Tab")
    visit.page.keyboard.press("Control+A")
    visit.page.keyboard.type("Hi")
    visit.page.keyboard.press("Control+Enter")
    visit.waits_for("#reply", "Hello w")
    assert visit.page.is_enabled("#stop")
    visit.waits_for("#requests", "decode")
    engine.allow(10**9)
    visit.waits_for("#reply", "Hello wörld €!")
    visit.waits_for("#reply-note", "tokens in")
    prompt, params = engine.submitted[0]
    assert engine.tokenizer.decode(prompt) == "[user]Hi\n[assistant]"
    assert (params.max_tokens, params.temperature) == (128, 0.7)
    visit.page.focus("#chart-generated .plot")
    visit.page.keyboard.press("ArrowLeft")
    sync_api.expect(visit.page.locator("#chart-generated .plot")).to_have_attribute("aria-label", re.compile("s ago"))
    assert (visit.complaints, visit.strangers) == ([], [])


def test_stop_aborts_the_request(address: tuple[str, int], open_page: Open, engine: FakeEngine) -> None:
    engine.allow(2)
    visit = open_page(address)
    visit.waits_for("#state", "Ready")
    visit.page.click("#send")
    visit.waits_for("#reply", "Hello")
    visit.page.click("#stop")
    visit.waits_for("#reply-note", "Stopped after")
    eventually(lambda: len(engine.aborted) == 1)
    assert visit.page.is_enabled("#send")
    assert visit.complaints == []


def test_a_model_without_a_template_continues_the_text(open_page: Open) -> None:
    engine = FakeEngine(template=None)
    with listening(engine, ServerConfig(port=0)) as address:
        visit = open_page(address)
        visit.waits_for("#prompt-label", "Text to continue")
        visit.page.fill("#prompt", "Once")
        visit.page.click("#send")
        visit.waits_for("#reply", "OnceHello wörld €!")
    assert engine.tokenizer.decode(engine.submitted[0][0]) == "Once"
    engine.close()


def test_what_a_model_writes_is_never_markup(open_page: Open) -> None:
    reply = "<img src=x onerror=alert(1)><b>hi</b>"
    engine = FakeEngine(reply)
    with listening(engine, ServerConfig(port=0, served_model_name="<i>m</i>")) as address:
        visit = open_page(address)
        visit.waits_for("h1", "<i>m</i>")
        visit.page.click("#send")
        visit.waits_for("#reply", reply)
        assert visit.page.locator("#reply img, #reply b, h1 i").count() == 0
        assert (visit.complaints, visit.strangers) == ([], [])
    engine.close()


def test_the_key_is_asked_for_and_kept_nowhere(open_page: Open, engine: FakeEngine) -> None:
    with listening(engine, ServerConfig(port=0, api_key="the-key")) as address:
        visit = open_page(address)
        visit.waits_for("#state", "Locked")
        assert visit.text("h1").strip() == ""
        for key, answer in (("wrong", "refused this key"), ("the-key", "")):
            visit.page.fill("#key", key)
            visit.page.click("#key-form button")
            if answer:
                visit.waits_for("#key-note", answer)
        visit.waits_for("#state", "Ready")
        assert visit.page.is_hidden("#key-form")
        visit.page.click("#send")
        visit.waits_for("#reply", "Hello wörld €!")
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert "the-key" not in visit.page.evaluate(kept)
        visit.page.reload()
        visit.waits_for("#state", "Locked")
    assert all("401" in complaint for complaint in visit.complaints), visit.complaints


def test_a_full_queue_is_said_with_when_to_come_back(
    address: tuple[str, int], open_page: Open, engine: FakeEngine
) -> None:
    engine.num_queued_requests = 10**6
    visit = open_page(address)
    visit.waits_for("#state", "Ready")
    visit.page.click("#send")
    visit.waits_for("#reply-note", "try again in 1 s")
    engine.num_queued_requests = 0
    visit.page.click("#send")
    visit.waits_for("#reply", "Hello wörld €!")


def test_an_engine_that_fails_under_a_reply_is_said(
    address: tuple[str, int], open_page: Open, engine: FakeEngine
) -> None:
    engine.allow(2)
    visit = open_page(address)
    visit.waits_for("#state", "Ready")
    visit.page.click("#send")
    visit.waits_for("#reply", "Hello")
    engine.die()
    visit.waits_for("#reply-note", "Not answered: ")
    visit.waits_for("#state", "Engine failed")
    assert visit.page.is_enabled("#send")


def test_a_server_that_is_gone_is_said(open_page: Open, engine: FakeEngine) -> None:
    with listening(engine, ServerConfig(port=0)) as address:
        visit = open_page(address)
        visit.waits_for("#state", "Ready")
    visit.waits_for("#state", "Unreachable")
    visit.page.click("#send")
    visit.waits_for("#reply-note", "The server cannot be reached.")
