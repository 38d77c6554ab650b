// Keeps the page current: fetches it again, and replaces the parts that have changed.
"use strict";

const KEEP_LINES = 5000;
const live = document.getElementById("live");
document.documentElement.classList.add("js");

function say(state, text) {
  live.hidden = false;
  live.dataset.state = state;
  live.textContent = text;
}

// Where the reader is in a part that is replaced: a selector that finds the same place in the new one.
function placeOf(element) {
  const around = element.parentElement;
  if (around.matches("details[id]")) return `#${CSS.escape(around.id)} > ${element.localName}`;
  const name = ["href", "data-copy", "aria-label"].find((each) => element.hasAttribute(each));
  return name ? `[${name}="${CSS.escape(element.getAttribute(name))}"]` : null;
}

function replace(part, fresh) {
  // what the reader has opened stays open
  for (const open of part.querySelectorAll("details[open][id]")) {
    fresh.querySelector(`#${CSS.escape(open.id)}`)?.setAttribute("open", "");
  }
  if (fresh.innerHTML === part.innerHTML) return;
  const selection = document.getSelection();
  if (!selection.isCollapsed && part.contains(selection.anchorNode)) return;
  const focused = part.contains(document.activeElement) ? placeOf(document.activeElement) : null;
  const scrolled = [...part.querySelectorAll(".scroll, .lines")].map((box) => box.scrollTop);
  const bottom = [...part.querySelectorAll(".lines")].every(isAtBottom);
  part.innerHTML = fresh.innerHTML;
  part.querySelectorAll(".scroll, .lines").forEach((box, index) => { box.scrollTop = scrolled[index] ?? 0; });
  if (bottom) part.querySelectorAll(".lines").forEach(toBottom);
  if (focused) part.querySelector(focused)?.focus({ preventScroll: true });
}

function isAtBottom(box) { return box.scrollHeight - box.scrollTop - box.clientHeight < 40; }
function toBottom(box) { box.scrollTop = box.scrollHeight; }

async function refresh() {
  const response = await fetch(location.href);
  const next = new DOMParser().parseFromString(await response.text(), "text/html");
  if (!response.ok) throw new Error(next.querySelector("#error p")?.textContent ?? response.statusText);
  if (document.getElementById("error")) return location.reload();
  const announcer = document.getElementById("announcer");
  for (const part of document.querySelectorAll("[data-live]")) {
    const fresh = next.getElementById(part.id);
    if (!fresh) continue;
    if (part.dataset.announce !== fresh.dataset.announce) {
      announcer.textContent = part.dataset.announce = fresh.dataset.announce;
    }
    replace(part, fresh);
  }
  document.title = next.title;
  document.body.dataset.seconds = next.body.dataset.seconds;
}

async function keepCurrent() {
  for (;;) {
    const seconds = Number(document.body.dataset.seconds);
    if (!seconds) return;
    await new Promise((done) => setTimeout(done, seconds * 1000));
    if (document.hidden) continue;
    try {
      await refresh();
      say("on", "Live");
    } catch (error) {
      say("off", `Not updated: ${error.message}`);
    }
  }
}

function follow(box) {
  const state = document.getElementById("stream-state");
  const stream = new EventSource(box.dataset.stream);
  stream.onopen = () => { box.replaceChildren(); say("on", "Live"); };
  stream.onerror = () => say("off", stream.readyState === EventSource.CLOSED ? "Not connected" : "Connecting again");
  stream.addEventListener("line", (event) => {
    const line = JSON.parse(event.data);
    const stay = isAtBottom(box);
    const row = element("div", "line");
    const text = element("span", "text");
    if (line.stamp) text.append(element("span", "stamp", line.stamp), " ");
    text.append(line.text);
    row.append(element("span", `rank rank-${line.colour}`, line.rank), text);
    box.append(row);
    if (box.childElementCount > KEEP_LINES) box.firstElementChild.remove();
    if (stay) toBottom(box);
  });
  stream.addEventListener("end", () => {
    stream.close();
    live.hidden = true;
    state.textContent = "This is the end of the log.";
  });
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  document.getElementById("announcer").textContent = "Copied";
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1500);
});

document.querySelectorAll(".lines").forEach(toBottom);
const streamed = document.querySelector("[data-stream]");
if (streamed) follow(streamed);
if (Number(document.body.dataset.seconds)) say("on", "Live");
keepCurrent();
