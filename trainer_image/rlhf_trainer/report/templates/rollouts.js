"use strict";

/* The rows that fit the filters, in their order; an empty filter fits all, a row without the number of a filter none. */
function chosen(rows, wanted) {
  const within = (value, least, most) =>
    (least === "" || (value !== null && value >= Number(least))) &&
    (most === "" || (value !== null && value <= Number(most)));
  const text = wanted.text.toLowerCase();
  const found = rows.filter((row) =>
    (wanted.job === "" || row.job === wanted.job) &&
    within(row.step, wanted.firstStep, wanted.lastStep) &&
    within(row.reward, wanted.leastReward, wanted.mostReward) &&
    (wanted.finished === "" || row.finished === (wanted.finished === "yes")) &&
    [row.prompt, row.response, row.columns].some((part) => part.toLowerCase().includes(text)));
  const [key, sign] = wanted.order.split(" ");
  return found.sort((a, b) =>
    (a[key] === null) - (b[key] === null) || Number(sign) * (a[key] - b[key]) || a.step - b.step || a.row - b.row);
}

const AT_ONCE = 50;
const NUMBERS = ["reward", "cost", "advantage", "prompt_tokens", "response_tokens", "policy_version"];
const rows = JSON.parse(document.getElementById("rollouts").textContent).rows;
const form = document.getElementById("filters");
const more = document.getElementById("more");
let shown = AT_ONCE;

function element(tag, className, text, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  made.append(...children);
  return made;
}

/* Of an episode: what the model wrote and learns from, with its reward, or what its environment or its program said.
   A turn that does not go on from the one before begins a branch. */
function turn(one, place) {
  const notes = one.reward && one.written ? [` · reward ${Number(one.reward.toPrecision(4))}`] : [];
  if (one.after !== undefined && one.after !== place - 1) {
    const from = one.after === null ? "another beginning" : one.after < 0 ? "the prompt" : `part ${one.after + 1}`;
    notes.unshift(` · part ${place + 1}, a branch from ${from}`);
  }
  const spans = notes.map((text) => element("span", "quiet small", text));
  return element("p", one.written ? "text" : "observed", one.text, ...spans);
}

function card(row) {
  const numbers = NUMBERS.map((name) => [name.replace("_", " "), row[name]]);
  numbers.splice(1, 0, ...Object.entries(row.parts).map(([name, value]) => ["· " + name, value]));
  numbers.push(...Object.entries(row.episode).map(([name, value]) => [name.replace("_", " "), value]));
  const told = numbers.filter(([, value]) => value !== null)
    .map(([name, value]) => element("span", "", `${name} ${Number(value.toPrecision(4))}`));
  return element("article", "sample", "",
    element("p", "quiet small", `${row.job}, step ${row.step}, row ${row.row}${row.finished ? "" : ", cut off"}`),
    element("p", "prompt", row.prompt),
    ...(row.turns.length ? row.turns.map(turn) : [element("p", "text", row.response)]),
    ...(row.columns ? [element("p", "quiet small columns-of", row.columns)] : []),
    element("p", "scores", "", ...told));
}

function show() {
  const found = chosen(rows, Object.fromEntries(new FormData(form)));
  document.getElementById("count").textContent = `${found.length} of ${rows.length} responses`;
  document.getElementById("found").replaceChildren(...found.slice(0, shown).map(card));
  more.hidden = found.length <= shown;
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", () => { shown = AT_ONCE; show(); });
more.addEventListener("click", () => { shown += AT_ONCE; show(); });
const job = decodeURIComponent(location.hash.slice(1));
if ([...form.elements.job.options].some((option) => option.value === job)) form.elements.job.value = job;
show();
