// Nodes from values. Text becomes text nodes only: the page never reads text of a model or of a
// prompt as markup.

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
  const content = String(text);
  if (node.textContent !== content) node.textContent = content;
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

// Return the text with every occurrence of `needle` in a <mark>.
export function marked(text, needle) {
  const holder = document.createDocumentFragment();
  const low = text.toLowerCase();
  const lowNeedle = needle.toLowerCase();
  let begin = 0;
  // If lower case changes the length, positions in `low` are not those in `text`: mark nothing.
  while (lowNeedle && low.length === text.length) {
    const place = low.indexOf(lowNeedle, begin);
    if (place < 0) break;
    holder.append(text.slice(begin, place));
    holder.append(element("mark", {}, text.slice(place, place + lowNeedle.length)));
    begin = place + lowNeedle.length;
  }
  holder.append(text.slice(begin));
  return holder;
}

// Run `render` only when the value differs from the previous one, so that nodes that somebody
// reads or has focused stay as they are.
export function whenChanged(render) {
  let before;
  return (value, ...others) => {
    const text = JSON.stringify([value, ...others]);
    if (text === before) return;
    before = text;
    render(value, ...others);
  };
}
