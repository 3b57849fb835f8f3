// SPDX-License-Identifier: Apache-2.0
"use strict";

// What a model writes reaches the page as text only, never as markup.

const byId = (id) => document.getElementById(id);

/** A new element with a class and text. */
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Events of a stream ------------------------------------------------------------------------------

/** The JSON values of a server-sent event stream, as they come. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** What went wrong, from an answer that is no success. */
async function sentenceOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Figures ------------------------------------------------------------------------------------------

/** Running totals over rounds: what the figures and the calibration table show. */
class Totals {
  constructor() {
    this.rounds = this.drafted = this.committed = this.tokens = 0;
    this.positions = []; // of drafts: {predicted, observed, seen}
    this.started = performance.now();
    this.first = this.last = null;
  }

  add(round) {
    this.rounds += 1;
    this.tokens += round.tokens.length;
    this.last = performance.now();
    this.first ??= { at: this.last, tokens: round.tokens.length };
    if (!round.drafted) return;
    this.drafted += 1;
    this.committed += round.accepted + 1;
    for (let k = 0; k < round.verified && round.survival; k++) {
      const position = (this.positions[k] ??= { predicted: 0, observed: 0, seen: 0 });
      position.predicted += round.survival[k];
      position.observed += round.accepted > k ? 1 : 0;
      position.seen += 1;
    }
  }

  get acceptedLength() {
    return this.drafted ? this.committed / this.drafted : null;
  }

  /** Tokens behind the first round's over the time they took. */
  get tokensPerSecond() {
    const seconds = this.first ? (this.last - this.first.at) / 1000 : 0;
    return seconds > 0 ? (this.tokens - this.first.tokens) / seconds : null;
  }
}

// Drawing ------------------------------------------------------------------------------------------

function drawTokens(round, place) {
  for (const token of round.tokens) {
    const span = element("span", token.kind, token.text);
    span.title = `${token.kind}, token ${token.id}`;
    span.dataset.id = token.id;
    place.append(span);
  }
}

/** A bar a drafted position: its height is the predicted survival, its colour what became of it. */
function drawRound(round, number) {
  const row = element("div", "round");
  row.append(element("span", "number", number));
  const length = round.drafted ? `ℓ ${round.verified}, accepted ${round.accepted}` : "not drafted";
  row.append(element("span", "length", length));
  const bars = element("span", "bars");
  (round.survival ?? []).forEach((survival, k) => {
    const fate = k >= round.verified ? "unverified" : k < round.accepted ? "drafted" : "rejected";
    const bar = element("span", fate);
    bar.style.height = `${Math.max(2, Math.round(26 * survival))}px`;
    bar.title = `position ${k + 1}: survival ${survival.toFixed(3)}`;
    bars.append(bar);
  });
  row.append(bars, element("span", "text", round.tokens.map((token) => token.text).join("")));
  row.title = `${round.reason}; ${round.requests} requests, ${round.target_rows} target rows, ` +
    `${(1000 * round.round_seconds).toFixed(1)} ms, ${(1000 * round.draft_seconds).toFixed(1)} of them drafting`;
  byId("rounds").prepend(row);
}

function shown(value, digits, unit = "") {
  return value === null ? "–" : value.toFixed(digits) + unit;
}

function drawAcceptedLength(length) {
  byId("accepted-length").textContent = shown(length, 2);
}

function drawFigures(totals, round) {
  drawAcceptedLength(totals.acceptedLength);
  byId("speed").textContent = shown(totals.tokensPerSecond, 0);
  byId("first").textContent = shown(totals.first && totals.first.at - totals.started, 0, " ms");
  byId("count").textContent = totals.rounds;
  byId("reason").textContent = round.reason;
}

function drawCalibration(positions) {
  const rows = positions.map((position, k) => {
    const row = element("tr");
    const predicted = position.predicted / position.seen;
    const observed = position.observed / position.seen;
    const chart = element("td", "chart");
    for (const [name, share] of [["predicted", predicted], ["observed", observed]]) {
      const bar = element("div", name);
      bar.style.width = `${100 * share}%`;
      chart.append(bar);
    }
    row.append(element("td", "", k + 1), element("td", "", predicted.toFixed(3)),
      element("td", "", observed.toFixed(3)), chart, element("td", "", position.seen));
    return row;
  });
  byId("calibration").tBodies[0].replaceChildren(...rows);
}

function say(text) {
  byId("message").textContent = text;
}

// The server ---------------------------------------------------------------------------------------

let messages = []; // of the chat so far
let allPositions = new Totals(); // of every answer shown
let leaving = null; // stops the answer under way

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

/** The body of a request, as the form says. */
function requestBody(text) {
  const seed = byId("seed").value;
  const isChat = byId("mode").value === "chat";
  return {
    model: byId("model").textContent,
    ...(isChat ? { messages: [...messages, { role: "user", content: text }] } : { prompt: text }),
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("tokens").value),
    ...(seed !== "" && { seed: Number(seed) }),
    stream: true,
    stream_options: { include_usage: true },
    dspark: { trace: true, speculate: byId("speculate").checked },
  };
}

async function generate(text) {
  const isChat = byId("mode").value === "chat";
  const totals = new Totals();
  leaving = new AbortController();
  const response = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(requestBody(text)),
    signal: leaving.signal,
  });
  if (!response.ok) throw new Error(await sentenceOf(response));
  const output = byId("output");
  output.append(element("span", "user", text));
  const place = element("span", "answer");
  output.append(place);
  let answer = "";
  for await (const chunk of eventsOf(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) drawAcceptedLength(chunk.usage.dspark.accepted_length); // drafts behind a stop left out
    for (const choice of chunk.choices) {
      answer += choice.delta?.content ?? choice.text ?? "";
      if (!choice.dspark) continue;
      const round = choice.dspark.round;
      totals.add(round);
      allPositions.add(round);
      drawTokens(round, place);
      drawRound(round, totals.rounds);
      drawFigures(totals, round);
      drawCalibration(allPositions.positions);
    }
  }
  if (isChat) messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
}

async function showModel() {
  const response = await fetch("v1/models", { headers: headers() });
  byId("key-field").hidden = response.status !== 401 && byId("key").value === "";
  if (!response.ok) return say(await sentenceOf(response));
  const model = (await response.json()).data[0];
  byId("model").textContent = model.id;
  if (!model.dspark.chat) {
    byId("mode").value = "completion";
    byId("mode").options[0].disabled = true;
  }
  say("");
}

async function showEngine() {
  const response = await fetch("status", { headers: headers() });
  if (!response.ok) return;
  const status = await response.json();
  const tau = status.accepted_length === null ? "none yet" : status.accepted_length.toFixed(2);
  byId("engine").textContent = [
    `The whole engine: ${status.active} active, ${status.waiting} waiting, ` +
      `accepted length ${tau}, scheduler ${status.scheduler}.`,
    ...status.notes,
  ].join(" ");
}

function setRunning(isRunning) {
  byId("go").disabled = isRunning;
  byId("stop").disabled = !isRunning;
}

byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  say("");
  setRunning(true);
  try {
    if (byId("model").textContent === "") await showModel();
    await generate(byId("prompt").value);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message);
  }
  setRunning(false);
  await showEngine().catch(() => {});
});
byId("stop").addEventListener("click", () => leaving?.abort());
byId("clear").addEventListener("click", () => {
  messages = [];
  allPositions = new Totals();
  for (const id of ["output", "rounds"]) byId(id).replaceChildren();
  drawCalibration([]);
});
byId("key").addEventListener("change", () => showModel());
showModel().catch((error) => say(error.message));
