// What stands in the fields is asked for at every key, and kept in the address.
const form = document.getElementById("fields");
const shown = document.getElementById("shown");
const copied = document.getElementById("copied");
let lines = {}, asked = 0;

const fill = (fields) => { for (const [name, value] of Object.entries(fields)) if (form.elements[name]) form.elements[name].value = value; };

async function ask() {
  const turn = ++asked;
  const query = new URLSearchParams(new FormData(form)).toString();
  history.replaceState(null, "", `#${query}`);
  shown.classList.add("stale");
  let found;
  try {
    found = await (await fetch(`/view?${query}`)).json();
  } catch {
    found = { error: "the server does not answer\n  start it again: xshard explore", field: "expression" };
  }
  if (turn !== asked) return;  // a later key has asked since
  for (const control of form.elements) {
    const error = document.getElementById(`error-${control.name}`), here = control.name === found.field;
    control.setAttribute("aria-invalid", String(here));
    error.hidden = !here;
    error.textContent = here ? found.error : "";
  }
  if (found.error) return;
  lines = found;
  shown.innerHTML = found.html;
  shown.classList.remove("stale");
  withSteps(shown);
}

form.addEventListener("input", ask);
form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
for (const button of document.querySelectorAll("[data-fields]")) {
  button.addEventListener("click", () => { fill(JSON.parse(button.dataset.fields)); ask(); });
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const text = button.dataset.copy === "link" ? location.href : lines[button.dataset.copy] || "";
    try {
      await navigator.clipboard.writeText(text);
      copied.textContent = "copied";
    } catch {
      copied.textContent = text;  // no clipboard here: to be copied by hand
    }
  });
}
addEventListener("hashchange", () => { fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1)))); ask(); });
fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
ask();
