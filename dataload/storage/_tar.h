/* The lines of a text index of a tar archive; see tar_lines in _core_numpy.py. Reads a text that ends with a zero. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST_EXTENSIONS = 256, MOST_DIGITS = 18 };

typedef struct {
    const char *start;
    ptrdiff_t length;
} Word;

typedef struct {
    Word extensions[MOST_EXTENSIONS];
    int known;
    uint8_t *codes;                     /* of each component */
    uint32_t *blocks, *sizes;
    uint32_t *ends, *key_ends;          /* of each sample */
    char *keys;
    int64_t components, width, key_length; /* of each sample; -1 if they vary */
} Lines;

/* Read a word that a space or, if it is the last of a component, a newline ends; return where it ends, or NULL. */
static const char *read_word(const char *at, const char *end, int last) {
    const char *start = at;
    while ((unsigned char)*at > ' ') at++;
    return at > start && (*at == ' ' || (last && (*at == '\n' || at == end))) ? at : NULL;
}

/* Read a number of at most 18 digits and what ends it; return -1 for another word. */
static int64_t read_number(const char **at, const char *end, int last) {
    const char *start = *at;
    int64_t number = 0;
    if (!(*at = read_word(start, end, last)) || *at - start > MOST_DIGITS) return -1;
    for (; start < *at; start++) {
        if (*start < '0' || *start > '9') return -1;
        number = 10 * number + *start - '0';
    }
    return number;
}

/* The number of an extension, probably `likely`; -1 if there are too many. */
static int code_of(Lines *p, const char *start, ptrdiff_t length, int likely) {
    for (int tried = 0; tried < p->known; tried++) {
        int code = (likely + tried) % p->known;
        if (p->extensions[code].length == length && !memcmp(p->extensions[code].start, start, length)) return code;
    }
    if (p->known == MOST_EXTENSIONS) return -1;
    p->extensions[p->known] = (Word){start, length};
    return p->known++;
}

/* Parse `samples` lines of components of `fields` words; return 0 if one is unusual, or a number needs over 32 bits. */
static int parse_lines(Lines *p, const char *at, const char *end, int64_t samples, int fields) {
    int64_t first = 0, key_bytes = 0;
    for (int64_t sample = 0; sample < samples; sample++, first = p->components) {
        do {
            const char *word = at, *key;
            if (at > end || !(at = read_word(word, end, 0))) return 0;
            int expected = p->width > 0 ? p->codes[p->components - p->width] : 0, code = code_of(p, word, at - word, expected);
            at++;
            int64_t offset = read_number(&at, end, 0);
            if (code < 0 || offset < 0 || offset % 512 || offset / 512 > UINT32_MAX) return 0;
            at++;
            int64_t size = read_number(&at, end, fields == 3);
            if (size < 0 || size > UINT32_MAX) return 0;
            if (fields == 4) {
                key = ++at;
                if (!(at = read_word(key, end, 1))) return 0;
                if (p->components == first) { /* up to the first dot of the last part */
                    const char *stop = at;
                    while (stop > key && stop[-1] != '/') stop--;
                    const char *dot = memchr(stop, '.', at - stop);
                    int64_t length = (dot ? dot : at) - key;
                    memcpy(p->keys + key_bytes, key, length);
                    key_bytes += length;
                    if (key_bytes > UINT32_MAX) return 0;
                    p->key_ends[sample] = (uint32_t)key_bytes;
                    p->key_length = !sample || p->key_length == length ? length : -1;
                }
            }
            if (p->width > 0 && code != expected) p->width = -1;
            p->codes[p->components] = (uint8_t)code;
            p->blocks[p->components] = (uint32_t)(offset / 512);
            p->sizes[p->components++] = (uint32_t)size;
        } while (*at++ == ' ');
        p->ends[sample] = (uint32_t)p->components;
        if (!sample) p->width = p->components;
        if (p->components - first != p->width) p->width = -1;
    }
    return p->components <= UINT32_MAX;
}
