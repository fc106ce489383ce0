"""One module a page: it reads a selector, renders a template, or calls one service and shows what it answered."""
