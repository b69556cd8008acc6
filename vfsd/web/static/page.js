// Keys and live updates.  Everything else works without this file.
"use strict";

const status = document.getElementById("status");

function say(text) {
  status.textContent = text;
  status.hidden = false;
}

// -- live updates: the page is fetched again and its <main> replaced, unless the user is in the middle of something
let waiting = false;
let running = false;
let notBefore = 0;

// What takes longer (counting changes) is fetched when the page is there; then it is part of each update, and there are
// fewer of them, because each one costs the workspace time.
let isWhole = false;

function address() {
  const url = new URL(location.href);
  if (isWhole) url.searchParams.set("wait", "1");
  return url;
}

function complete() {
  if (!isWhole && document.querySelector("main [data-wait]")) {
    isWhole = waiting = true;
  }
}

function isBusy() {
  const active = document.activeElement;
  const edits = active && active.closest("main form") && active.matches("input, select, button");
  const filled = [...document.querySelectorAll("main input:not([type=hidden])")].some((i) => i.value !== i.defaultValue);
  return Boolean(edits || filled || document.querySelector("main details[open]") || document.getElementById("keys").open);
}

async function refresh() {
  const began = performance.now();
  if (running || document.hidden || isBusy() || began < notBefore) {
    waiting = true;
    return;
  }
  running = true;
  waiting = false;
  try {
    const answer = await fetch(address(), { credentials: "same-origin" });
    const fetched = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const main = document.querySelector("main");
    if (!fetched) {
      say("The page cannot be updated: reload it.");
    } else if (isBusy()) {
      waiting = true;
    } else if (fetched.innerHTML !== main.innerHTML) {
      const focused = document.activeElement && document.activeElement.getAttribute("href");
      main.replaceWith(document.importNode(fetched, true));
      if (focused) {
        const again = [...document.querySelectorAll("main a")].find((a) => a.getAttribute("href") === focused);
        if (again) again.focus({ preventScroll: true });
      }
    }
  } catch {
    say("The server has ended: start `vfsd web` again.");
  } finally {
    running = false;
    complete();
    if (isWhole) notBefore = performance.now() + 10 * (performance.now() - began);
  }
}

if (document.body.dataset.live) {
  const events = new EventSource(document.body.dataset.live);
  events.addEventListener("ready", () => say("live"));
  events.addEventListener("change", refresh);
  events.addEventListener("error", () => say("not live: the server or the workspace has ended"));
  addEventListener("pagehide", () => events.close());
}

complete();
if (isWhole) refresh();
setInterval(() => waiting && refresh(), 1000);

// -- forms are sent once
addEventListener("submit", (event) => {
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "yes";
});
addEventListener("pageshow", () => document.querySelectorAll("form").forEach((form) => delete form.dataset.sent));

// -- keys
function move(by) {
  const rows = [...document.querySelectorAll("main .row")];
  const at = rows.indexOf(document.activeElement);
  const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
  if (rows[next]) rows[next].focus();
}

function follow(link) {
  if (link) location.href = link.href;
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const keys = document.getElementById("keys");
  if (event.key === "?") {
    keys.open ? keys.close() : keys.showModal();
  } else if (keys.open) {
    return;
  } else if (event.key === "j" || event.key === "k") {
    move(event.key === "j" ? 1 : -1);
  } else if (event.key === "u") {
    follow(document.querySelector("link[rel=up]"));
  } else if ("tcr".includes(event.key)) {
    follow(document.querySelector(`[data-key=${event.key}]`));
  } else {
    return;
  }
  event.preventDefault();
});
