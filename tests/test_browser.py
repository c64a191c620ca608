"""The book as a reader sees it: every page in Chromium, wide and narrow."""

import functools
import http.server
import threading

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
WIDTHS = {"laptop": 1280, "phone": 390}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(book):
    """The address of the rendered book on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=book)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def pages(book):
    """Every page of the book, as paths below the site."""
    found = sorted(path.relative_to(book).as_posix() for path in book.rglob("*.html") if "_static" not in path.parts)
    found.remove("index.html")
    assert "book/index.html" in found and any(page.startswith("notebooks/") for page in found)
    return found


@pytest.fixture(scope="module")
def browser(chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(params=WIDTHS.values(), ids=WIDTHS.keys())
def page(request, browser, site):
    """A tab that writes down what goes wrong in it."""
    tab = browser.new_page(viewport={"width": request.param, "height": 844})
    tab.trouble = []
    tab.on("console", lambda message: message.type == "error" and tab.trouble.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: tab.trouble.append(f"script: {error}"))
    tab.on("requestfailed", lambda request: tab.trouble.append(f"failed: {request.url}"))
    tab.on("response", lambda response: response.status >= 400 and tab.trouble.append(f"{response.status}: {response.url}"))
    tab.on("request", lambda request: is_external(request.url, site) and tab.trouble.append(f"external: {request.url}"))
    yield tab
    tab.close()


def is_external(url, site):
    return not url.startswith((site, "data:", "blob:"))


def settle(page, url):
    page.goto(url, wait_until="load")
    page.evaluate("window.MathJax?.startup?.promise")
    page.wait_for_load_state("networkidle")


OVERFLOWING = """() => [...document.querySelectorAll('.bd-article *')].filter(e => {
    if (e.getBoundingClientRect().right <= innerWidth + 1) return false
    for (let p = e; p && p !== document.body; p = p.parentElement)
        if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return false
    return true
}).slice(0, 3).map(e => e.outerHTML.slice(0, 150))"""


CUT_OFF = """() => [
    ...[...document.querySelectorAll('.bd-article mjx-container[display]')].filter(e =>
        e.getBoundingClientRect().left < e.parentElement.getBoundingClientRect().left - 1),
    ...(innerWidth < 1200 ? [] : [...document.querySelectorAll('.cell_input pre')].filter(e =>
        !e.closest('details:not([open])') && e.scrollWidth > e.clientWidth)),
].map(e => e.textContent.slice(0, 150))"""
"""Formulas whose beginning no scrolling reaches, and on a laptop code that has to be scrolled."""


def test_every_page_loads_whole_and_fits_the_window(page, pages, site):
    faults = []
    for name in pages:
        settle(page, f"{site}/{name}")
        faults += [f"{name}: {trouble}" for trouble in page.trouble]
        page.trouble.clear()
        if page.evaluate("document.querySelectorAll('.math').length") and not page.locator("mjx-container").count():
            faults.append(f"{name}: formulas are not rendered")
        if errors := page.locator("mjx-merror").count():
            faults.append(f"{name}: {errors} formulas with errors")
        if page.evaluate("document.scrollingElement.scrollWidth > innerWidth"):
            faults.append(f"{name}: scrolls sideways because of {page.evaluate(OVERFLOWING)}")
        if cut_off := page.evaluate(CUT_OFF):
            faults.append(f"{name}: cut off: {cut_off}")
        if bare := page.evaluate("[...document.images].filter(i => !i.alt.trim()).map(i => i.outerHTML.slice(0, 150))"):
            faults.append(f"{name}: no alt text: {bare}")
        if broken := page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src.slice(0, 150))"):
            faults.append(f"{name}: broken images {broken}")
    assert not faults, "\n".join(faults)


def test_the_folder_itself_leads_to_the_landing_page(page, site):
    page.goto(site)
    page.wait_for_url(f"{site}/book/index.html")


def test_each_chapter_offers_its_notebook_and_the_way_on(page, pages, site):
    for name in pages:
        if name.startswith("notebooks/"):
            settle(page, f"{site}/{name}")
            source = name.replace(".html", ".ipynb")
            assert page.locator(f'a[href$="_sources/{source}"]').count() == 1, f"{name}: no download"
            answer = page.request.get(f"{site}/_sources/{source}")
            assert answer.ok and '"cells"' in answer.text()
            assert page.locator("a.left-prev").count() == page.locator("a.right-next").count() == 1


def test_an_animation_plays(page, pages, site):
    with_animation = []
    for name in pages:
        settle(page, f"{site}/{name}")
        if page.locator(".animation img").count():
            with_animation.append(name)
            image = page.locator(".animation img").first
            first = image.get_attribute("src")
            page.get_by_title("Play", exact=True).first.click()
            page.wait_for_function("([img, src]) => img.src !== src", arg=[image.element_handle(), first], timeout=5000)
    assert with_animation, "no page holds an animation"


def test_dark_mode_toggles_and_leaves_figures_alone(page, site):
    settle(page, f"{site}/notebooks/01_softmax.html")
    page.evaluate("localStorage.clear()")
    button = page.locator("button.theme-switch-button:visible").first
    seen = set()
    for _ in range(3):
        button.click()
        seen.add(page.evaluate("document.documentElement.dataset.theme"))
    assert seen == {"light", "dark"}
    while page.evaluate("document.documentElement.dataset.theme") != "dark":
        button.click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    filters = page.evaluate("[...document.querySelectorAll('.bd-article img')].map(i => getComputedStyle(i).filter)")
    assert set(filters) <= {"none"}


def test_search_finds_softmax(page, site):
    settle(page, f"{site}/search.html?q=softmax")
    page.wait_for_selector("#search-results li a", timeout=10_000)
    hits = page.locator("#search-results li a").evaluate_all("links => links.map(a => a.href)")
    assert any("01_softmax" in hit for hit in hits)
    assert not page.trouble
