"""Every page in a real browser: it moves, filters, is used by keys, and loads nothing from elsewhere."""

import json

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import headrace as hr
from control.service import controller, parent
from headrace.control.client import Client, Endpoint
from headrace.web.source import ControllerPolicies
from tests_shared import png
from web.accessibility import contrast, problems
from web.serving import FakeController, Serving, small_demo, traced_run, until

controller, parent = controller, parent  # noqa: PLW0127 - fixtures

PAGES = (
    "/", "/starving", "/storage", "/job?id={job}", "/runs", "/policies", "/stores", "/signin",
)  # fmt: skip
EVIL = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A small demo with a store and a policy."""
    folder = tmp_path_factory.mktemp("site")
    samples = [{"name": f"cats/{i}.png", "data": png(i, 48), "label": 0} for i in range(70)]
    hr.pack([*samples, {"name": EVIL, "data": b"<script>", "label": 0}], folder / "s.hr")
    given = {"stores": [str(folder / "s.hr")], "runs": (str(traced_run(folder)),)}
    with Serving(
        folder,
        tokens="operator {operator}\n",
        policies=ControllerPolicies(FakeController()),
        **given,
    ) as one:
        running = small_demo().cluster().jobs
        one.job = max(running, key=lambda job: job.gpus).job_id
        yield one


NAV = """
const menu = document.querySelector('nav ul').getBoundingClientRect();
const one = document.querySelector('nav a[aria-current]').getBoundingClientRect();
return one.left >= menu.left - 1 && one.right <= menu.right + 1;
"""


def looks(browser):
    return int(browser.run("return document.body.dataset.looks") or 0)


def show(browser, site, page, **how):
    """Open a page and wait until it shows something."""
    browser.open(site.url + page.format(job=getattr(site, "job", "")), **how)
    if not page.startswith("/signin"):
        until(lambda: looks(browser))


def text(browser, selector):
    return browser.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)


def one(browser, selector):
    return browser.driver.find_element(By.CSS_SELECTOR, selector)


@pytest.mark.parametrize("page", ["/", "/storage", "/stores"])
def test_the_menu_shows_the_page_one_is_on_a_phone_too(browser, site, page):
    show(browser, site, page, width=320)
    assert browser.run(NAV)


def test_the_leaderboard_fits_a_phone(browser, site):
    show(browser, site, "/starving", width=400)
    until(lambda: browser.visible("#jobs td"))
    wide, room = browser.run(
        "const b = document.querySelector('#jobs table'); return [b.offsetWidth, innerWidth]"
    )
    assert wide <= room
    heads = browser.texts("#jobs th[scope=col]")
    assert [head.split(" ")[0] for head in heads] == ["Job", "Lost", "Waits", "Cause"]


def test_causes_are_words(browser, site):
    show(browser, site, "/")
    keys = until(lambda: browser.texts("#causekeys li"))
    assert not any("_" in key for key in keys)
    assert (
        browser.run("return (await import('/static/core.js')).causeName('slow_rank')")
        == "slow rank"
    )


def test_what_helps_shows_commands_as_code(browser, site):
    for page, place in (("/starving", ".advice"), ("/job?id={job}", "#answer")):
        show(browser, site, page)
        until(lambda place=place: any(browser.texts(f"{place} code")))
        assert not any("`" in text for text in browser.texts(place))


@pytest.mark.parametrize("how", [{}, {"dark": True}, {"width": 390}],
                         ids=["light", "dark", "narrow"])  # fmt: skip
@pytest.mark.parametrize("page", PAGES)
def test_every_page_suits_everybody(browser, site, page, how):
    show(browser, site, page, **how)
    assert problems(browser) == []
    assert browser.too_wide() == []
    console, asked = browser.said_and_asked()
    assert console == []
    assert [url for url in asked if not url.startswith(site.url + "/")] == []


def test_the_check_of_contrast_can_fail(browser, site):
    assert contrast("rgb(0, 0, 0)", ["rgb(255, 255, 255)"]) == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", ["rgba(0, 0, 0, 0)", "rgb(255, 255, 255)"]) < 4.5
    show(browser, site, "/policies")
    wrong = "<h4 id=x>a</h4><p id=x>b</p><button></button><div role=row>c</div>"
    browser.run("document.querySelector('main').innerHTML += arguments[0]", wrong)
    browser.run("document.querySelector('#x').style.color = '#ccc'")
    text = "\n".join(problems(browser))
    for fault in ("skips one", "there twice", "has no name", "a row within", "contrast 1.6"):
        assert fault in text


def test_the_grid_moves_by_itself(browser, site):
    show(browser, site, "/")
    assert text(browser, "#live") == "live"
    pixels = "return document.querySelector('canvas').toDataURL()"
    before, seen = browser.run(pixels), looks(browser)
    until(lambda: looks(browser) >= seen + 3)
    assert browser.run(pixels) != before
    assert "busy GPUs" in text(browser, "#answer")


@pytest.mark.parametrize("page", ["/starving", "/storage", "/job?id={job}"])
def test_other_pages_move_by_themselves(browser, site, page):
    show(browser, site, page)
    seen = looks(browser)
    until(lambda: looks(browser) > seen, 25)


def test_a_filter_is_kept_in_the_address(browser, site):
    show(browser, site, "/")
    user = browser.run("return document.querySelector('#users option').value")
    one(browser, "[name=user]").send_keys(user)
    until(lambda: "GPUs of" in text(browser, "#matched"))
    matched = text(browser, "#matched")
    address = browser.driver.current_url
    assert f"user={user}" in address
    browser.open(address)
    until(lambda: looks(browser))
    assert one(browser, "[name=user]").get_attribute("value") == user
    assert text(browser, "#matched").split(";")[0] == matched.split(";")[0]
    one(browser, "button[type=reset]").click()
    until(lambda: text(browser, "#matched") == "")
    assert "user=" not in browser.driver.current_url


def test_partitions_are_shown_alone(browser, site):
    show(browser, site, "/?partition=a100")
    assert browser.run(
        "return [...document.querySelectorAll('#grid h3')].map(e => e.firstChild.data.trim())"
    ) == ["a100"]


def test_a_cause_is_chosen_by_its_key(browser, site):
    show(browser, site, "/")
    key = until(lambda: browser.visible("#figures button[data-cause]"))[0]
    cause = key.get_attribute("data-cause")
    key.click()
    until(lambda: f"cause={cause}" in browser.driver.current_url)
    until(
        lambda: (
            one(browser, f"#figures button[data-cause={cause}]").get_attribute("aria-pressed")
            == "true"
        )
    )


def label(browser):
    return one(browser, "#cell").get_attribute("aria-label")


def test_the_grid_is_used_by_keys(browser, site):
    show(browser, site, "/")
    browser.run("document.querySelector('button[type=reset]').focus()")
    keys = browser.driver.switch_to.active_element
    keys.send_keys(Keys.TAB)
    grid = browser.driver.switch_to.active_element
    assert grid.get_attribute("id") == "grid"
    first = label(browser)
    node = first.split(",")[0]
    assert first.startswith(f"{node}, GPU 0")
    for key, starts in (
        (Keys.ARROW_RIGHT, f"{node}, GPU 1"),
        (Keys.END, f"{node}, GPU 7"),
        (Keys.HOME, f"{node}, GPU 0"),
    ):
        grid.send_keys(key)
        assert label(browser).startswith(starts)
    grid.send_keys(Keys.ARROW_DOWN)
    assert label(browser).split(",")[0] != node
    grid.send_keys(Keys.ARROW_UP)
    assert label(browser).startswith(f"{node}, GPU 0")
    grid.send_keys(Keys.PAGE_DOWN)
    assert label(browser).startswith("dgx"), "the next partition"
    style = (
        "const s = getComputedStyle(document.querySelector('#cell'));"
        "return [s.visibility, s.borderTopWidth]"
    )
    assert browser.run(style) == ["visible", "3px"]
    while ": job" not in label(browser):
        grid.send_keys(Keys.ARROW_RIGHT)
    job = label(browser).split(": job ")[1].split()[0]
    grid.send_keys(Keys.ENTER)
    until(lambda: f"/job?id={job}" in browser.driver.current_url)
    until(lambda: job in text(browser, "h1"))


def test_the_first_tab_skips_to_the_content_and_focus_is_seen(browser, site):
    show(browser, site, "/starving")
    seen = []
    for _ in range(14):
        browser.run("window.before = document.activeElement")
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        until(lambda: browser.run("return document.activeElement !== window.before"))
        seen.append(browser.run(
            "const e = document.activeElement, s = getComputedStyle(e), left = e.getBoundingClientRect().left;"
            "return [e.className, s.outlineStyle, parseFloat(s.outlineWidth), left >= 0]"
        ))  # fmt: skip
    assert seen[0][0] == "skip"
    assert all(style != "none" and width >= 2 and inside for _, style, width, inside in seen), seen
    browser.run("document.querySelector('.skip').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.run("return document.activeElement.id") == "main"


def test_on_a_phone_all_of_the_menu_is_seen(browser, site):
    show(browser, site, "/stores", width=280)
    outside = (
        "return [...document.querySelectorAll('nav a')].filter(e => {"
        "const b = e.getBoundingClientRect(); return b.left < 0 || b.right > innerWidth}).length"
    )
    assert browser.run(outside) == 0
    assert not browser.too_wide()


def test_the_leaderboard_is_sorted_and_filtered(browser, site):
    show(browser, site, "/starving")

    def column(place):
        script = (
            "return [...document.querySelectorAll('#jobs tbody tr')]"
            ".map((r) => r.cells[arguments[0]].textContent)"
        )
        return browser.run(script, place)

    lost = [float(each.replace(",", "")) for each in column(2)]
    assert lost == sorted(lost, reverse=True)
    assert len(lost) > 5
    one(browser, "[data-sort=user]").click()
    until(lambda: column(1) == sorted(column(1)))
    assert "sort=user" in browser.driver.current_url
    sorted_by = (
        "return document.querySelector('[data-sort=user]').closest('th').getAttribute('aria-sort')"
    )
    assert browser.run(sorted_by) == "ascending"
    assert browser.run("return document.activeElement.dataset.sort") == "user", "focus stays"
    one(browser, "[name=cause]").send_keys("decode")
    until(lambda: set(column(5)) == {" decode"})


def test_a_sample_is_found_and_its_picture_seen(browser, site):
    show(browser, site, "/stores")
    one(browser, "[name=prefix]").send_keys("cats/6" + Keys.ENTER)
    until(lambda: text(browser, "#samplename") == "cats/6.png")
    size = "return document.querySelector('#sample img')?.naturalWidth"
    until(lambda: browser.run(size) == 48)
    assert "crc32c" in text(browser, "#sample")
    one(browser, "#samples li:nth-child(2) button").click()
    until(lambda: text(browser, "#samplename") == "cats/60.png")


def test_hostile_names_of_samples_are_text(browser, site):
    show(browser, site, "/stores?prefix=%3Cimg")
    until(lambda: text(browser, "#samplename") == EVIL)
    assert "<script>" in text(browser, "#sample pre")
    assert browser.run("return document.querySelectorAll('img[src=x], main script').length") == 0
    assert "Stores" in browser.driver.title


class Hostile:
    """The demo, with names that would be HTML."""

    label, period_s = EVIL, 0.2

    def __init__(self):
        self._demo = small_demo()

    def __getattr__(self, name):
        return getattr(self._demo, name)

    def cluster(self):
        moment = self._demo.cluster()
        import dataclasses

        jobs = [
            dataclasses.replace(j, name=EVIL, user=EVIL, account=EVIL, cause=EVIL, file_system=EVIL)
            for j in moment.jobs
        ]
        nodes = [
            dataclasses.replace(n, name=f"{EVIL}{i}", partition=EVIL, away=EVIL)
            for i, n in enumerate(moment.nodes)
        ]
        return dataclasses.replace(moment, nodes=nodes, jobs=jobs, waiting=0, notes=(EVIL,))

    def records(self):
        records = self._demo.records()
        for record in records:
            record.name = record.user = record.account = EVIL
        return records

    def storage(self):
        return json.loads(
            json.dumps(self._demo.storage()).replace("/scratch", "<img src=x onerror=1>")
        )


@pytest.mark.parametrize("page", ["/", "/starving", "/storage"])
def test_hostile_names_are_text(browser, serve, page):
    site = serve(source=Hostile())
    show(browser, site, page)
    if page == "/":
        browser.run("document.querySelector('#grid').focus()")
        assert EVIL in label(browser)
    assert browser.run("return document.querySelectorAll('img, main script').length") == 0
    assert browser.driver.title != "1"
    assert EVIL in text(browser, ".banner")
    console, _ = browser.said_and_asked()
    assert console == []


def test_a_policy_is_checked_and_applied_by_who_signed_in(browser, serve, controller):
    controller.apply("file_systems: {fs: {paths: [/x], capacity: {bytes_per_s: 100M}}}")
    site = serve(
        tokens="operator {operator}\n",
        policies=ControllerPolicies(Client(Endpoint(url=controller.url))),
    )
    show(browser, site, "/policies")
    version = controller.state()["policy_version"]
    until(lambda: "100M" in one(browser, "#text").get_attribute("value"))

    def edit():
        area = one(browser, "#text")
        area.clear()
        area.send_keys("file_systems: {fs: {paths: [/x], capacity: {bytes_per_s: 250M}}}")
        one(browser, "#check").click()
        until(lambda: "250M" in text(browser, "#said"))
        assert "100M \u2192 250M" in text(browser, ".diff")

    edit()
    assert not one(browser, "#apply").is_enabled()
    assert "sign in" in text(browser, "#said")
    assert controller.state()["policy_version"] == version
    show(browser, site, "/signin")
    one(browser, "[name=token]").send_keys("wrong" + Keys.ENTER)
    until(lambda: "the token is wrong" in text(browser, "[role=alert]"))
    one(browser, "[name=token]").send_keys(site.operator + Keys.ENTER)
    until(lambda: "operator" in text(browser, "header"))
    assert site.operator not in browser.driver.current_url
    show(browser, site, "/policies")
    until(lambda: "100M" in one(browser, "#text").get_attribute("value"))
    edit()
    until(lambda: one(browser, "#apply").is_enabled())
    one(browser, "#text").send_keys(" ")
    assert not one(browser, "#apply").is_enabled(), "what is applied is what was checked"
    edit()
    until(lambda: one(browser, "#apply").is_enabled())
    one(browser, "#apply").click()
    until(lambda: f"version {version + 1} holds" in text(browser, "#said"))
    assert controller.state()["policy_version"] == version + 1
    one(browser, "header form button").click()
    until(lambda: "Sign in" in text(browser, "header"))


def test_what_is_wrong_with_a_policy_is_listed(browser, site):
    show(browser, site, "/policies")
    until(lambda: one(browser, "#text").is_displayed())
    area = one(browser, "#text")
    area.clear()
    area.send_keys("jobs: {a: {wieght: 1}}")
    one(browser, "#check").click()
    until(lambda: "wieght" in text(browser, "#said [role=alert] li"))


def test_a_lost_connection_is_said_and_found_again(browser, serve):
    site = serve()
    show(browser, site, "/")
    until(lambda: text(browser, "#live") == "live")
    hang_up = [client.hang_up for client in site.web.live.clients]
    seen = looks(browser)
    site.loop.call_soon_threadsafe(lambda: [each() for each in hang_up])
    until(lambda: "lost" in text(browser, "#live"))
    until(lambda: text(browser, "#live") == "live")
    until(lambda: looks(browser) > seen)
