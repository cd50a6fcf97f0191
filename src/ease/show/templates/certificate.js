"use strict";
// Checks the signed statement in this page: signatures, key ids, and that what is shown is what was signed.

const envelope = JSON.parse(document.getElementById("envelope").textContent);
const STATES = { good: "✓", bad: "✗", unknown: "?" };

function tell(state, title, words) {
  const box = document.getElementById("check");
  box.className = `verdict ${state}`;
  box.querySelector(".mark").textContent = STATES[state];
  box.querySelector("strong").textContent = title;
  box.querySelector(".words").textContent = words;
}

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const hex = (buffer) => [...new Uint8Array(buffer)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const sha256 = async (content) => hex(await crypto.subtle.digest("SHA-256", content));

// What DSSE signs: type and content, each behind its length in bytes.
function signed(kind, content) {
  const letters = new TextEncoder();
  const name = letters.encode(kind);
  const head = letters.encode(`DSSEv1 ${name.length} ${kind} ${content.length} `);
  const all = new Uint8Array(head.length + content.length);
  all.set(head);
  all.set(content, head.length);
  return all;
}

function at(value, pointer) {
  for (const part of pointer.split("/").slice(1)) {
    value = value[part.replaceAll("~1", "/").replaceAll("~0", "~")];
  }
  return value;
}

// Spelt as canonical JSON spells it: keys in order, numbers as here.
function spelt(value) {
  if (Array.isArray(value)) return `[${value.map(spelt).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  return `{${Object.keys(value).sort().map((key) => `${JSON.stringify(key)}:${spelt(value[key])}`).join(",")}}`;
}

function shows(part, value) {
  if (part.dataset.digits) return Math.abs(Number(part.textContent) - value) <= 0.501 * 10 ** -Number(part.dataset.digits);
  return part.textContent === (typeof value === "string" ? value : spelt(value)).replace(/\r\n?/g, "\n"); // as HTML reads it
}

class Changed extends Error {}

async function check() {
  const content = bytes(envelope.payload);
  const message = signed(envelope.payloadType, content);
  if (!envelope.signatures.length) throw new Changed("There is no signature.");
  for (const each of envelope.signatures) {
    const raw = bytes(each.public);
    if ((await sha256(raw)) !== each.keyid) throw new Changed("A key is not the one that its id names.");
    let key;
    try {
      key = await crypto.subtle.importKey("raw", raw, { name: "Ed25519" }, false, ["verify"]);
    } catch (error) {
      if (error.name === "NotSupportedError") return null;
      throw new Changed("A key cannot be read.");
    }
    if (!(await crypto.subtle.verify({ name: "Ed25519" }, key, bytes(each.sig), message))) {
      throw new Changed("A signature does not hold: the content was changed after it was signed.");
    }
  }
  const statement = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(content));
  if (statement.subject[0].digest.sha256 !== statement.predicate.models.after) {
    throw new Changed("The statement is about another model than it tells of.");
  }
  if (statement.predicate.log.key !== envelope.signatures[0].keyid) {
    throw new Changed("The first signature is not by the key that the statement names.");
  }
  for (const part of document.querySelectorAll("[data-of]")) {
    if (!shows(part, at(statement, part.dataset.of))) {
      throw new Changed(`This page shows something else than was signed: ${part.textContent}`);
    }
  }
  const listed = [...document.querySelectorAll("#genuine ~ ul code")].map((part) => part.textContent);
  if (listed.join() !== envelope.signatures.map((each) => each.keyid).join()) {
    throw new Changed("This page lists other keys than those that signed.");
  }
  return statement;
}

const UNABLE = "This browser cannot check here; use ease verify.";

check().then(
  (statement) => {
    if (statement === null) return tell("unknown", "Not checked.", UNABLE);
    const count = envelope.signatures.length;
    const passed = { true: "good", false: "bad", null: "unknown" }[statement.predicate.verdict.passed];
    document.getElementById("verdict").className = `verdict ${passed}`;
    document.querySelector("#verdict .mark").textContent = STATES[passed];
    tell("good", "Unchanged.", `${count} signature${count > 1 ? "s hold" : " holds"}, and this page shows what was signed.`);
    const known = new Map(Object.entries(statement.predicate.files).map(([name, hash]) => [hash, `${name} of this answer`]));
    const models = statement.predicate.models;
    known.set(models.before, "the model before");
    known.set(models.after, "the model that this certificate is about");
    if (models.retrain) known.set(models.retrain, "the retrained model of the audit");
    document.getElementById("file").addEventListener("change", async (event) => {
      const lines = [];
      for (const file of event.target.files) {
        const found = known.get(await sha256(await file.arrayBuffer()));
        lines.push(`${file.name}: ${found ? `is ${found}` : "is no file that this certificate tells of"}.`);
      }
      document.getElementById("hashed").textContent = lines.join(" ");
    });
  },
  (error) => {
    // Without a secure context there is no crypto.subtle at all.
    if (!globalThis.crypto?.subtle) return tell("unknown", "Not checked.", UNABLE);
    const words = error instanceof Changed ? error.message : "The certificate in this page is damaged.";
    tell("bad", "Changed! Do not trust this page.", words);
  },
);
