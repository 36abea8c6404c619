// The timer of docs/devices.md in JavaScript, without dependencies.
//
// A device is a value: methods return the device as it is afterwards, and `kept` the text that has
// to be on disk before an upload is sent. `node timer.js` answers events of tools/check_timer.py.

"use strict";

const isTime = (number) => Number.isFinite(number) && number >= 0;

/** Returns a policy, with 0 seconds for timers of rounds alone and null for no limit. */
function policy({ rounds = 1, seconds = 0, tolerance = 0, most = null }) {
  if (!Number.isInteger(rounds) || rounds < 1) {
    throw new RangeError(`rounds must be an integer of at least 1, found ${rounds}`);
  }
  if (most !== null && (!Number.isInteger(most) || most < 1)) {
    throw new RangeError(`most must be null or an integer of at least 1, found ${most}`);
  }
  if (!isTime(seconds) || !isTime(tolerance) || (seconds > 0 && seconds <= 2 * tolerance)) {
    throw new RangeError("seconds must be 0, or more than twice the tolerance of at least 0");
  }
  return { rounds, seconds, tolerance, most };
}

/** Returns the policy of what both policies allow. */
function stricter(one, other) {
  const withTime = [one, other].filter((each) => each.seconds > 0);
  const limits = [one.most, other.most].filter((each) => each !== null);
  return policy({
    rounds: Math.max(one.rounds, other.rounds),
    seconds: Math.max(one.seconds, other.seconds),
    tolerance: withTime.length ? Math.min(...withTime.map((each) => each.tolerance)) : 0,
    most: limits.length ? Math.min(...limits) : null,
  });
}

class Device {
  constructor(contact, mark, entries = {}, job = null) {
    Object.assign(this, { contact, mark, entries, job });
  }

  /** Returns a device that starts: the kept one, or a new installation at the server's time. */
  static started(kept, seconds, mark) {
    try {
      const found = JSON.parse(kept);
      const entries = Object.create(null);
      for (const [run, entry] of Object.entries(found.entries)) {
        const { round, clock, participations } = entry;
        if (![round, clock, participations].every(Number.isFinite)) throw new TypeError(run);
        entries[run] = { round, clock, participations, policy: policy(entry.policy) };
      }
      if (found.mark === mark && Number.isFinite(found.contact)) {
        return new Device(found.contact, mark, entries);
      }
    } catch {
      // Nothing can be read: a new installation.
    }
    return new Device(seconds, mark, Object.create(null));
  }

  /** Returns the text to keep on disk, but in no backup. Jobs end when the device restarts. */
  kept() {
    const { contact, mark, entries } = this;
    return JSON.stringify({ contact, mark, entries });
  }

  /** Returns the device after a request; it takes part if its job is another one than before. */
  ask(request, own, clock) {
    const entry = this.entries[request.run];
    const rule = entry ? stricter(own, entry.policy) : own;
    const isRight = Math.abs(clock - request.seconds) <= rule.tolerance;
    if (rule.seconds > 0 && !isRight) return this;
    if (!entry && !(this.contact < request.run_began)) {
      // Another installation may have taken part until now.
      const noted = { round: request.round_index, clock, participations: 0, policy: rule };
      return this.with(request.run, noted, this.job);
    }
    if (this.job) return this;
    if (entry) {
      const before = entry.policy;
      const isChecked = before.seconds > 0 && before.tolerance <= rule.tolerance;
      // The clock of the last upload may have been wrong: the time begins again.
      if (rule.seconds > 0 && !isChecked) {
        return this.with(request.run, { ...entry, clock, policy: rule }, null);
      }
      if (request.round_index < entry.round + rule.rounds) return this;
      if (rule.seconds > 0 && !(clock >= entry.clock + rule.seconds)) return this;
      if (rule.most !== null && entry.participations >= rule.most) return this;
    }
    const { run, round_index: round, token } = request;
    const job = { run, round, token, clock, policy: rule, isUploading: false };
    return new Device(this.contact, this.mark, this.entries, job);
  }

  /** Returns the device that counts its job; it sends after `kept` is on disk. */
  upload() {
    if (!this.job || this.job.isUploading) throw new Error("there is no job to upload");
    const { run, round, clock, policy: rule } = this.job;
    const participations = 1 + (this.entries[run]?.participations ?? 0);
    const job = { ...this.job, isUploading: true };
    return this.with(run, { round, clock, participations, policy: rule }, job);
  }

  /** Returns the device without its job: acknowledged, lost or given up, which are alike. */
  end() {
    return new Device(this.contact, this.mark, this.entries);
  }

  with(run, entry, job) {
    const entries = Object.assign(Object.create(null), this.entries, { [run]: entry });
    return new Device(this.contact, this.mark, entries, job);
  }
}

/** Returns a function from events to answers, for tools/check_timer.py. */
function driver() {
  let device, own, disk, backup;
  const then = (next) => {
    device = next;
    disk = device.kept();
  };
  return (event) => {
    switch (event.do) {
      case "start": {
        try {
          own = policy(event.policy);
        } catch {
          return { refused: "policy" };
        }
        const text = { kept: disk, empty: "", backup, damaged: "{" }[event.disk];
        then(Device.started(text, event.seconds, event.mark));
        return { done: true };
      }
      case "back_up":
        backup = disk;
        return { done: true };
      case "ask": {
        const before = device.job;
        then(device.ask(event, own, event.clock));
        return { takes_part: device.job !== before };
      }
      case "upload":
        try {
          then(device.upload());
        } catch {
          return { refused: "job" };
        }
        return { participations: device.entries[device.job.run].participations };
      case "end":
        device = device.end();
        return { done: true };
      default:
        throw new Error(`no such event: ${event.do}`);
    }
  };
}

if (require.main === module) {
  const answer = driver();
  const lines = require("node:readline").createInterface({ input: process.stdin });
  lines.on("line", (line) => process.stdout.write(`${JSON.stringify(answer(JSON.parse(line)))}\n`));
}

module.exports = { Device, policy, stricter };
