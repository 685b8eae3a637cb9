// Nodes from values. Text becomes text nodes only: whatever a model or a prompt says, the page
// never reads it as markup.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

// The text with every place that holds `needle` in a <mark>.
export function marked(text, needle) {
  const holder = document.createDocumentFragment();
  const low = text.toLowerCase();
  const wanted = needle.toLowerCase();
  let begin = 0;
  // Where lower case has another length, places would be off by some letters.
  while (wanted && low.length === text.length) {
    const place = low.indexOf(wanted, begin);
    if (place < 0) break;
    holder.append(text.slice(begin, place));
    holder.append(element("mark", {}, text.slice(place, place + wanted.length)));
    begin = place + wanted.length;
  }
  holder.append(text.slice(begin));
  return holder;
}

// Runs `render` only when the value differs from the one before, so that nothing that somebody
// reads or has focused is made anew without need.
export function whenChanged(render) {
  let before;
  return (value, ...others) => {
    const text = JSON.stringify([value, ...others]);
    if (text === before) return;
    before = text;
    render(value, ...others);
  };
}
