/* Pages of LMDB's B-trees; see lmdb_nodes in _lmdb.py, which gives the same. It trusts nothing that a page says, and reads
 * each number once, so that pages that change meanwhile do no harm. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t *out[4];
    int64_t *counts;
    const char *pages;
    const int64_t *numbers;
    ptrdiff_t count;
    int64_t page_size, header_size, size;
    int kind;
} Parse;

enum { BRANCH = 1, KINDS = 0x6F, LARGE = 1, NODE_BYTES = 8 };
enum { BAD_KIND = 1, BAD_BOUNDS, BAD_POSITION, BAD_ENTRY, BAD_PAGE };

static int64_t load16(const char *at) {
    uint16_t number;
    memcpy(&number, at, 2);
    return number;
}

/* The number below 10**18 whose digits are the key, or -1. */
static int64_t decimal(const char *key, int64_t size) {
    int64_t number = 0;
    for (int64_t place = 0; place < size; place++) {
        int digit = (unsigned char)key[place] - '0';
        if (digit < 0 || digit > 9 || number >= 100000000000000000) return -1;
        number = 10 * number + digit;
    }
    return size ? number : -1;
}

/* Fill in the node at `at`, which is followed by `room` bytes of its page; return why it is refused, or 0. */
static int parse_node(const Parse *p, const char *at, int64_t room, int64_t offset, int64_t node) {
    int64_t low = load16(at), high = load16(at + 2), flags = load16(at + 4), key = load16(at + 6);
    if (p->kind == BRANCH) {
        p->out[0][node] = low | high << 16 | flags << 32;
        return p->out[0][node] < 2 || p->out[0][node] >= p->size / p->page_size ? BAD_PAGE : 0;
    }
    int64_t length = low | high << 16;
    int64_t before = NODE_BYTES + key + (p->header_size == 24 ? key & 1 : 0); /* LMDB 1.0 aligns values to two bytes */
    if (before + (flags & LARGE ? 8 : length) > room) return BAD_ENTRY;
    offset += before;
    if (flags & LARGE) {
        uint64_t page;
        memcpy(&page, at + before, 8);
        if (page < 2 || page >= (uint64_t)(p->size / p->page_size)) return BAD_PAGE;
        offset = (int64_t)page * p->page_size + p->header_size;
        if (offset + length > p->size) return BAD_PAGE;
    }
    p->out[0][node] = offset;
    p->out[1][node] = length;
    p->out[2][node] = decimal(at + NODE_BYTES, key);
    p->out[3][node] = key | flags << 16;
    return 0;
}

/* Return the number of nodes in all pages, or -(8 * page + refusal). */
static int64_t parse_all(const Parse *p) {
    int64_t base = p->header_size == 24 ? 24 : 0, found = 0; /* since LMDB 1.0, positions do not count the header */
    for (ptrdiff_t page = 0; page < p->count; page++) {
        const char *start = p->pages + page * p->page_size, *end = start + p->header_size;
        int64_t lower = load16(end - 4) + base, upper = load16(end - 2) + base;
        int64_t nodes = (lower - p->header_size) / 2;
        if ((load16(end - 6) & KINDS) != p->kind) return -(8 * page + BAD_KIND);
        if (lower < p->header_size || lower > upper || upper > p->page_size ||
            nodes > p->page_size / (NODE_BYTES + 2))
            return -(8 * page + BAD_BOUNDS);
        p->counts[page] = nodes;
        for (int64_t i = 0; i < nodes; i++, found++) {
            int64_t at = load16(end + 2 * i) + base;
            if (at < p->header_size || at > p->page_size - NODE_BYTES || at % 2) return -(8 * page + BAD_POSITION);
            int bad = parse_node(p, start + at, p->page_size - at, p->numbers[page] * p->page_size + at, found);
            if (bad) return -(8 * page + bad);
        }
    }
    return found;
}
