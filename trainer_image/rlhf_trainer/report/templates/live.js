"use strict";

/* Asks for a page of `rlhf ui` again and again and, when it has changed, replaces its header and main part. */
const form = document.getElementById("filters");
const stale = document.getElementById("stale");
let tag = "", newest = 0, timer;

function replace(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const details = () => [...document.querySelectorAll("details")];
  const open = details().map((one) => one.open), focused = document.activeElement.id;
  for (const part of ["header", "main"]) document.querySelector(part).replaceWith(fresh.querySelector(part));
  if (details().length === open.length) details().forEach((one, place) => { one.open = open[place]; });
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

async function update() {
  clearTimeout(timer);
  const mine = ++newest, began = Date.now();
  try {
    const answer = await fetch(location.href, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    const text = await answer.text();
    if (mine !== newest) return;
    if (answer.ok) replace(text);
    stale.textContent = answer.ok || answer.status === 304 ? "" : text;
    tag = answer.headers.get("ETag") ?? "";
  } catch {
    stale.textContent = "This page is not up to date: `rlhf ui` does not answer.";
  }
  stale.hidden = stale.textContent === "";
  timer = setTimeout(next, Math.max(2000, 4 * (Date.now() - began)));  // a page with many plots takes seconds
}

function next() {
  if (!document.hidden) update();
}

document.addEventListener("visibilitychange", next);
document.addEventListener("input", () => {
  if (!form) return;
  tag = "";
  history.replaceState(null, "", `/?${new URLSearchParams(new FormData(form))}`);
  update();
});
timer = setTimeout(next, 2000);
