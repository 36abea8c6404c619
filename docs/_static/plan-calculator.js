// The plan calculator: fields of the page, a plan for them, and what a reader does with it.
"use strict";

(() => {
  const { planGrid: grid, planNumbers: numbers, planFleets: fleets } = window;
  const page = document.getElementById("plan-calculator");
  const DEFAULTS = {
    rounds: 500, population: 20000, clients: 100, epsilon: 8, delta: "", dropout: 10,
    returning: 100, absent: "", hours: "", minutes: "", goal: "",
  };
  const WHOLE = ["rounds", "population", "clients"];
  const [MOST_ROUNDS, MOST_DEVICES, MOST_SELECTED] = [10000, 999999999, 100000];
  const EPSILONS = [0.5, 1, 2, 4, 8, 16];
  const digits = (value) => String(Number(value.toPrecision(4)));
  const roundedUp = (value) => {
    const power = 10 ** (3 - Math.floor(Math.log10(value)));
    return digits(Math.ceil(value * power - 1e-9) / power);
  };
  const counted = (value) => value.toLocaleString("en");

  // The RMSE of the best mechanism of a kind over that of a banded square root: interpolated in
  // the logarithms of rounds and separation.
  function ratio(kind, rounds, separation) {
    if (rounds === 1 || (separation <= 1 && kind === "banded")) return 1;
    const at = (row) => {
      const places = grid.separations[row].map((each) => Math.log(each) / Math.log(grid.rounds[row]));
      const values = grid.ratios[kind][row];
      const last = values.length - 1;
      if (separation >= rounds) return values[last];
      return interpolated(places.slice(0, last), values, Math.log(separation) / Math.log(rounds));
    };
    const rows = grid.rounds.map((_, row) => at(row));
    return interpolated(grid.rounds.map(Math.log), rows, Math.log(rounds));
  }

  function interpolated(places, values, place) {
    const last = places.length - 1;
    const clamped = Math.min(places[last], Math.max(places[0], place));
    const right = Math.max(1, places.findIndex((each) => each >= clamped));
    const share = (clamped - places[right - 1]) / (places[right] - places[right - 1]);
    return values[right - 1] + share * (values[right] - values[right - 1]);
  }

  // The RMSE of mechanisms at noise multiplier 1, the least first.
  function errorsOf(rounds, schema) {
    const noise = numbers.bandedNoise(rounds, schema);
    const times = numbers.mostParticipations(rounds, schema);
    // Errors of the others jump between neighbouring separations, but where devices take part once.
    const kinds = schema.separation >= rounds ? Object.keys(grid.ratios) : ["banded"];
    const found = kinds.map((kind) => ({ kind, rmse: noise * ratio(kind, rounds, schema.separation) }));
    found.push({ kind: "identity", rmse: Math.sqrt((times * (rounds + 1)) / 2) });
    return found.sort((one, other) => one.rmse - other.rmse);
  }

  // A plan, or why there is none.
  async function planOf(asked) {
    const { rounds, population, clients, epsilon, delta } = asked;
    const fleet = {
      population, clients, dropout: asked.dropout / 100, returning: asked.returning / 100,
      absentRounds: asked.absent ?? 0, timerHours: asked.hours, roundMinutes: asked.minutes,
    };
    const pairs = await fleets.choose(fleet, rounds);
    if (!pairs.length) {
      return { why: "No separation keeps these rounds alive: use more devices, fewer clients per round or fewer rounds." };
    }
    const noiseMultiplier = numbers.noiseMultiplierOf(epsilon, delta);
    const candidates = errorsOf(rounds, pairs[0]).map((each) => ({
      ...each, effectiveRmse: (each.rmse * noiseMultiplier) / clients,
    }));
    return {
      schema: pairs[0], pairs, noiseMultiplier, candidates,
      participations: numbers.mostParticipations(rounds, pairs[0]),
      truePositiveRate: numbers.truePositiveRateOf(noiseMultiplier),
    };
  }

  // The effective RMSE of banded matrices with another population and the same slack.
  function noiseAt(asked, plan, population, clients = asked.clients) {
    const more = (population / clients) * (asked.clients / asked.population);
    // A timer of hours is as long for any number of devices.
    const scale = asked.hours === null ? more : 1;
    const separation = Math.min(asked.rounds, Math.floor(plan.schema.separation * scale));
    // With fewer devices the same timer would leave this fleet less slack.
    const isTight = asked.hours !== null && more < 1 - 1e-9;
    if (separation < 1 || isTight) return Infinity;
    const { most } = plan.schema;
    const schema = { separation, most: most === null ? null : Math.max(1, Math.ceil(most / more)) };
    const rmse = numbers.bandedNoise(asked.rounds, schema) * ratio("banded", asked.rounds, separation);
    return (rmse * plan.noiseMultiplier) / clients;
  }

  // The fewest devices with which the noise is at most a goal; null if no number is enough.
  function devicesFor(asked, plan, goal) {
    let [low, high] = [asked.clients, MOST_DEVICES];
    if (noiseAt(asked, plan, high) > goal) return null;
    while (high - low > Math.max(1, 0.002 * high)) {
      const middle = Math.round(Math.sqrt(low * high));
      if (noiseAt(asked, plan, middle) <= goal) high = middle;
      else low = middle;
    }
    return high;
  }

  window.planCalculator = { devicesFor, errorsOf, noiseAt, planOf };
  if (!grid || !page) return;

  const field = (name) => page.querySelector(`input[name=${name}]`);
  const show = (name, text) => {
    document.getElementById(`plan-${name}`).textContent = text;
  };

  // Exponential numbers as Python writes them.
  function exponential(value) {
    const [digit, power] = value.toExponential().split("e-");
    return power ? `${digit}e-${power.padStart(2, "0")}` : String(value);
  }

  // The fields as numbers, with defaults; or why they are none.
  function asked() {
    const found = {};
    for (const name of Object.keys(DEFAULTS)) {
      const typed = field(name).value.trim();
      found[name] = typed === "" ? null : Number(typed);
    }
    found.delta = found.delta ?? Number(`1e-${String(Math.trunc(found.population ?? 0)).length}`);
    found.dropout = found.dropout ?? 0;
    found.returning = found.returning ?? 100;
    const { rounds, population, clients, epsilon, delta, dropout, returning } = found;
    let why = "";
    if (!WHOLE.every((name) => Number.isSafeInteger(found[name]) && found[name] > 0)) {
      why = "Rounds, devices and clients per round are whole numbers above 0.";
    } else if (rounds > MOST_ROUNDS || population > MOST_DEVICES) {
      why = `This page computes up to ${counted(MOST_ROUNDS)} rounds and ${counted(MOST_DEVICES)} devices; mf-plan has no such limit.`;
    } else if (clients > MOST_SELECTED * (1 - dropout / 100) && dropout < 100) {
      why = `This page computes up to ${counted(MOST_SELECTED)} clients per round, dropouts included; mf-plan has no such limit.`;
    } else if (clients > population) why = "There are fewer devices than clients per round.";
    else if (!(epsilon >= 0.01 && epsilon <= 100)) why = "Epsilon is from 0.01 to 100.";
    else if (!(delta >= 1e-12 && delta < 1)) why = "Delta is at least 1e-12 and below 1.";
    else if (!(dropout >= 0 && dropout < 100)) why = "Dropouts are from 0 to below 100 %.";
    else if (!(returning > 0 && returning <= 100)) why = "Available devices are above 0 and up to 100 %.";
    else if ((found.hours === null) !== (found.minutes === null)) {
      why = "Hours of a timer and minutes of a round go together.";
    } else if (!(found.absent === null || (found.absent >= 0 && found.absent < Infinity))) {
      why = "Rounds of absence are a number of at least 0.";
    } else if ([found.hours, found.minutes, found.goal].some((each) => each !== null && !(each > 0 && each < Infinity))) {
      why = "Hours, minutes and the noise that you allow are numbers above 0.";
    }
    return { ...found, why };
  }

  function commandOf(given) {
    const flags = [
      `--num_rounds=${given.rounds}`, `--population=${given.population}`,
      `--clients_per_round=${given.clients}`, `--target_epsilon=${given.epsilon}`,
      `--delta=${exponential(given.delta)}`, "--model_size=1000000",
      `--dropout=${given.dropout / 100}`,
    ];
    if (given.returning !== 100) flags.push(`--returning=${given.returning / 100}`);
    if (given.absent) flags.push(`--absent_rounds=${given.absent}`);
    if (given.hours !== null) {
      flags.push(`--timer_hours=${given.hours}`, `--round_minutes=${given.minutes}`);
    }
    const lines = [];
    for (let k = 0; k < flags.length; k += 2) lines.push(flags.slice(k, k + 2).join(" "));
    return `mf-plan ${lines.join(" \\\n  ")}`;
  }

  function pythonOf(given, plan) {
    const { separation, most } = plan.schema;
    const limit = most === null ? "" : `, max_participations=${most}`;
    return [
      "import mf_aggregators as mfa", "",
      `matrix = mfa.factorizations.banded(${given.rounds}, num_bands=${separation})`,
      `timers = mfa.participation.MinSeparation(separation=${separation}${limit})`,
      `mechanism = mfa.calibrate(matrix, timers, epsilon=${given.epsilon}, delta=${exponential(given.delta)})`,
      `aggregator = mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=${given.clients})`,
    ].join("\n");
  }

  function goalOf(given, plan) {
    if (given.goal === null) return "";
    const devices = devicesFor(given, plan, given.goal);
    const rest = `${counted(given.clients)} a round and the slack of this fleet`;
    if (devices !== null) {
      return `For an effective RMSE of at most ${given.goal} you need about ${counted(Number(devices.toPrecision(2)))} devices, with ${rest}.`;
    }
    const once = noiseAt(given, plan, MOST_DEVICES);
    const clients = Math.ceil((given.clients * once) / given.goal);
    return (
      `No number of devices has an effective RMSE of ${given.goal} with ${rest}: where each takes ` +
      `part as rarely as it can, it is ${roundedUp(once)}. ${counted(clients)} clients per round would do.`
    );
  }

  function element(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // Curves over a logarithmic axis, each a colour and points [x, y], in a panel as wide as a phone.
  function draw(id, title, below, ticks, curves) {
    const [left, right, top, bottom, width, height] = [58, 18, 26, 40, 400, 260];
    const all = curves.flatMap((curve) => curve.points);
    const xs = all.map(([x]) => Math.log(x));
    const [low, high] = [Math.min(...xs), Math.max(...xs)];
    const most = Math.max(...all.map(([, y]) => y));
    const x = (value) => left + ((Math.log(value) - low) / (high - low)) * (width - left - right);
    const y = (value) => height - bottom - (value / most) * (height - top - bottom);
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const text = (words, attributes) => svg.append(element("text", attributes, words));
    text(title, { x: width / 2, y: 16, "text-anchor": "middle", class: "title" });
    text(below, { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" });
    text("effective RMSE", {
      x: 0, y: 0, "text-anchor": "middle",
      transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`,
    });
    const step = 10 ** Math.floor(Math.log10(most));
    const tick = most / step < 2 ? step / 4 : most / step < 5 ? step / 2 : step;
    for (let value = 0; value <= most; value += tick) {
      svg.append(element("path", { d: `M${left} ${y(value)}H${width - right}`, class: "grid" }));
      text(digits(value), { x: left - 5, y: y(value) + 4, "text-anchor": "end" });
    }
    for (const value of ticks) {
      const anchor = x(value) > width - 40 ? "end" : "middle";
      text(counted(value), { x: Math.min(width, x(value) + (anchor === "end" ? 15 : 0)), y: height - bottom + 16, "text-anchor": anchor });
    }
    svg.append(element("path", { d: `M${left} ${top}V${height - bottom}H${width - right}`, class: "axis" }));
    for (const { colour, points } of curves) {
      const line = points.map(([place, value]) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`);
      svg.append(element("polyline", { points: line.join(" "), stroke: colour, class: "curve" }));
    }
    document.getElementById(id).replaceChildren(svg);
  }

  function drawAll(given, plan) {
    const other = EPSILONS.map((each) => numbers.noiseMultiplierOf(each, given.delta));
    draw("plan-by-epsilon", "Noise in the model", "epsilon", EPSILONS, plan.candidates.map((each) => ({
      colour: grid.colours[each.kind],
      points: EPSILONS.map((value, k) => [value, (each.rmse * other[k]) / given.clients]),
    })));
    const ticks = [0.25, 1, 4].map((share) => Math.round(share * given.population));
    const points = [];
    for (let power = -2; power <= 2.01; power += 0.25) {
      const devices = given.population * 2 ** power;
      const noise = noiseAt(given, plan, devices);
      if (Number.isFinite(noise)) points.push([devices, noise]);
    }
    draw("plan-by-devices", "Banded, with other numbers of devices", "devices",
      ticks.filter((each) => points.some(([place]) => Math.abs(place / each - 1) < 0.01)),
      [{ colour: grid.colours.banded, points }]);
    const names = plan.candidates.map((each) => {
      const item = document.createElement("li");
      const mark = document.createElement("span");
      mark.style.background = grid.colours[each.kind];
      item.append(mark, each.kind);
      return item;
    });
    document.getElementById("plan-legend").replaceChildren(...names);
  }

  function fill(id, rows) {
    document.getElementById(id).replaceChildren(...rows.map((cells) => {
      const row = document.createElement("tr");
      for (const cell of cells) row.insertCell().textContent = cell;
      return row;
    }));
  }

  function present(given, plan) {
    const { separation, most } = plan.schema;
    const [best] = plan.candidates;
    const identity = plan.candidates.find((each) => each.kind === "identity");
    const times = plan.participations === 1 ? "once" : `${plan.participations} times`;
    const apart = plan.participations === 1 ? "" : `, at least ${counted(separation)} rounds apart`;
    show("recommended", `${best.kind} ${["banded", "toeplitz"].includes(best.kind) ? separation : ""}`.trim());
    show("participation", `Each device takes part at most ${times}${apart}: a timer${most === null ? "" : " and a counter"} on it enforces that.`);
    show("guarantee",
      `Noise multiplier ${roundedUp(plan.noiseMultiplier)} makes (${given.epsilon}, ` +
      `${exponential(given.delta)})-differential privacy for each device: an attacker finds at ` +
      `most ${roundedUp(100 * plan.truePositiveRate)}\u00a0% of them at 1\u00a0% false positives.`);
    show("gain",
      `The noise in the model (effective RMSE) is ${roundedUp(best.effectiveRmse)} clip norms, ` +
      `${digits(identity.rmse / best.rmse)} times less than with independent noise.`);
    show("goal", goalOf(given, plan));
    show("python", pythonOf(given, plan));
    fill("plan-candidates", plan.candidates.map((each) => [
      each.kind, roundedUp(each.effectiveRmse), roundedUp(each.rmse),
      each === best ? "recommended" : `${digits(each.rmse / best.rmse)} times`,
    ]));
    const noise = plan.pairs.map((each) => numbers.bandedNoise(given.rounds, each));
    fill("plan-pairs", plan.pairs.map((each, k) => [
      counted(each.separation), each.most === null ? "no limit" : String(each.most),
      k === 0 ? "least" : `${digits(noise[k] / noise[0])} times`,
    ]));
    drawAll(given, plan);
  }

  let started = 0;
  async function update() {
    const given = asked();
    started += 1;
    const mine = started;
    const link = Object.keys(DEFAULTS).filter((name) => field(name).value.trim() !== "")
      .map((name) => `${name}=${encodeURIComponent(field(name).value.trim())}`).join("&");
    document.getElementById("plan-link").href = `#${link}`;
    field("delta").placeholder = given.why ? "" : exponential(given.delta);
    show("outside", given.why || "Simulating fleets ...");
    document.getElementById("plan-run").hidden = given.why !== "";
    if (given.why) {
      document.getElementById("plan-inside").hidden = true;
      return;
    }
    show("command", commandOf(given));
    const plan = await planOf(given);
    // A later change has its own plan.
    if (mine !== started) return;
    show("outside", plan.why ?? "");
    document.getElementById("plan-inside").hidden = Boolean(plan.why);
    if (!plan.why) present(given, plan);
    page.dataset.state = "done";
  }

  const linked = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(DEFAULTS)) {
    field(name).value = linked.has("rounds") ? linked.get(name) ?? "" : value;
  }
  let timer = 0;
  page.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(update, 300);
  });
  page.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  update();
})();
