/* The lines of a text index of a tar archive; see tar_lines and tar_open in _core_numpy.py. Reads texts that end with a
 * zero. Included by _core.c.
 */
#include <stdio.h>

enum { MOST_EXTENSIONS = 256 };

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
    char *keys, *names;
    int64_t samples, components, width, key_length; /* of each sample; -1 if they vary */
    struct stat archive;
    char *text;
} Lines;

/* The bytes of the lines of a text of `rest` bytes, with all arrays, where each component has so many words. */
static size_t lines_size(int64_t rest, int fields) {
    return sizeof(Lines) + 17 * (rest / (2 * fields) + 1) + 2 * rest; /* a word and a space have two bytes */
}

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

/* Parse lines into zeros of `lines_size`; return 0 if one is unusual, or a number needs over 32 bits. */
static int parse_samples(Lines *p, const char *at, const char *end, int64_t samples, int fields) {
    int64_t most = (end - at) / (2 * fields) + 1;
    if (samples > most) return 0;
    p->samples = samples;
    p->blocks = (uint32_t *)(p + 1), p->sizes = p->blocks + most, p->ends = p->sizes + most;
    p->key_ends = p->ends + most, p->codes = (uint8_t *)(p->key_ends + most), p->keys = (char *)p->codes + most;
    p->names = p->keys + (end - at);
    return parse_lines(p, at, end, samples, fields);
}

/* (extensions, codes, ends, blocks, sizes, keys, key_ends) */
static PyObject *as_parts(const Lines *p, int fields) {
    char *end = p->names; /* of extensions, each followed by a space */
    for (int code = 0; code < p->known; code++, *end++ = ' ') {
        memcpy(end, p->extensions[code].start, p->extensions[code].length);
        end += p->extensions[code].length;
    }
    Py_ssize_t all = p->components, same = p->width > 0, keys = fields == 4 ? p->key_ends[p->samples - 1] : 0;
    return Py_BuildValue(
        "(y#y#y#y#y#y#y#)", p->names, (Py_ssize_t)(end - p->names), p->codes, same ? (Py_ssize_t)p->width : all,
        p->ends, same ? (Py_ssize_t)0 : 4 * p->samples, p->blocks, 4 * all, p->sizes, 4 * all, p->keys, keys,
        p->key_ends, fields == 3 ? (Py_ssize_t)0 : p->key_length >= 0 ? (Py_ssize_t)4 : 4 * p->samples
    );
}

/* tar_lines(text, start, samples, fields) -> as_parts, or None */
static PyObject *tar_lines(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (wrong("tar_lines", 4, count)) return NULL;
    char *text;
    Py_ssize_t length, start = PyLong_AsSsize_t(args[1]), samples = PyLong_AsSsize_t(args[2]);
    long fields = PyLong_AsLong(args[3]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[0], &text, &length)) return NULL;
    if (start < 0 || start > length || samples < 1 || (fields != 3 && fields != 4)) {
        PyErr_SetString(PyExc_ValueError, "expected at least one sample, and three or four fields");
        return NULL;
    }
    Lines *p = PyMem_Calloc(1, lines_size(length - start, fields));
    if (!p) return PyErr_NoMemory();
    int parsed;
    Py_BEGIN_ALLOW_THREADS
    parsed = parse_samples(p, text + start, text + length, samples, fields);
    Py_END_ALLOW_THREADS
    PyObject *found = parsed ? as_parts(p, fields) : Py_NewRef(Py_None);
    PyMem_Free(p);
    return found;
}

/* ---- Archives with an index ---- */

enum { LONGEST_INDEX = 800000, MOST_TEXT = 1 << 22, MEMBERS_CHECKED = 16, HEADER = 512 };

static void free_lines(Lines *p) {
    if (p) free(p->text);
    free(p);
}

/* Read and parse an index that has names; NULL if it is missing, not a regular file, long, or unusual. */
static Lines *read_index(const char *path) {
    struct stat found;
    int descriptor = open_regular(path, &found);
    if (descriptor < 0) return NULL;
    char *text = found.st_size <= LONGEST_INDEX ? malloc(found.st_size + 1) : NULL;
    int64_t length = text ? read(descriptor, text, found.st_size + 1) : -1, samples = 0;
    close(descriptor);
    const char *at = text ? text + 5 : NULL;
    if (length >= 5 && length == found.st_size && !memcmp(text, "v1.2 ", 5)) {
        text[length] = 0;
        samples = read_number(&at, text + length, 1);
    }
    Lines *p = samples > 0 && *at++ == '\n' ? calloc(1, lines_size(text + length - at, 4)) : NULL;
    if (p) p->text = text;
    else free(text);
    if (p && parse_samples(p, at, text + length, samples, 4)) return p;
    free_lines(p);
    return NULL;
}

/* Return whether a header is the usual one of a regular file with this key, extension and size. */
static int is_plain(const char *header, Word key, Word extension, uint32_t size) {
    char digits[12];
    if (key.length + extension.length > 98) return 0;
    snprintf(digits, sizeof digits, "%011o", size);
    return !memcmp(header, key.start, key.length) && header[key.length] == '.' &&
           !memcmp(header + key.length + 1, extension.start, extension.length) &&
           !header[key.length + 1 + extension.length] && !memcmp(header + 124, digits, 11) &&
           (!header[135] || header[135] == ' ') && (!header[156] || header[156] == '0' || header[156] == '7') &&
           !memcmp(header + 257, "ustar", 5) && !header[345];
}

/* Return whether all components are inside an archive, and, if asked, some are where the index puts them. */
static int has_members(int descriptor, const Lines *p, int checks) {
    int64_t count = p->components, checked = !checks ? 0 : count < MEMBERS_CHECKED ? count : MEMBERS_CHECKED, sample = 0;
    for (int64_t at = 0; at < count; at++)
        if (!p->blocks[at] || HEADER * (int64_t)p->blocks[at] + p->sizes[at] > p->archive.st_size) return 0;
    for (int64_t each = 0; each < checked; each++) {
        int64_t at = checked > 1 ? each * (count - 1) / (checked - 1) : 0;
        while (p->ends[sample] <= at) sample++;
        Word key = {p->keys + (sample ? p->key_ends[sample - 1] : 0), 0};
        key.length = p->keys + p->key_ends[sample] - key.start;
        char header[HEADER];
        if (pread(descriptor, header, HEADER, HEADER * (int64_t)(p->blocks[at] - 1)) != HEADER) return 0;
        if (!is_plain(header, key, p->extensions[p->codes[at]], p->sizes[at])) return 0;
    }
    return 1;
}

/* Open an archive of this version and its index; NULL unless both are usual, and fit each other. */
static Lines *open_archive(const char *archive, const char *index, const int64_t *version, int checks) {
    int64_t found[3];
    Lines *p = read_index(index);
    int descriptor = p ? open_regular(archive, &p->archive) : -1, same = 0;
    if (descriptor >= 0) {
        fill_version(found, &p->archive);
        same = !memcmp(found, version, sizeof found) && has_members(descriptor, p, checks);
        close(descriptor);
    }
    if (same) return p;
    free_lines(p);
    return NULL;
}

/* tar_open(archives, indexes, versions, checks) -> for the first of them, (device, inode, as_parts) or None. Paths are
 * separated by zero bytes. */
static PyObject *tar_open(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    char *archives, *indexes;
    Py_ssize_t length, other, numbers = 0, done = 0;
    if (wrong("tar_open", 4, count) || PyBytes_AsStringAndSize(args[0], &archives, &length) ||
        PyBytes_AsStringAndSize(args[1], &indexes, &other))
        return NULL;
    Py_ssize_t files = count_paths(archives, length);
    int checks = PyObject_IsTrue(args[3]), fits;
    int64_t *versions = copy_int64(args[2], &numbers), text = 0;
    if (!versions) return NULL;
    Lines **found = PyMem_Calloc(files, sizeof *found);
    fits = found && numbers == 3 * files && count_paths(indexes, other) == files;
    if (!found) PyErr_NoMemory();
    else if (!fits) PyErr_Format(PyExc_ValueError, "%zd archives, other indexes or %zd numbers", files, numbers);
    Py_BEGIN_ALLOW_THREADS
    for (; fits && done < files && text < MOST_TEXT; done++) {
        if ((found[done] = open_archive(archives, indexes, versions + 3 * done, checks)))
            text += found[done]->names - found[done]->keys;
        archives += strlen(archives) + 1, indexes += strlen(indexes) + 1;
    }
    Py_END_ALLOW_THREADS
    PyObject *list = fits ? PyList_New(done) : NULL;
    for (Py_ssize_t row = 0; row < done; row++) {
        Lines *p = found[row];
        PyObject *parts = list && p ? as_parts(p, 4) : NULL, *each = NULL;
        if (parts) each = Py_BuildValue("(LLN)", (long long)p->archive.st_dev, (long long)p->archive.st_ino, parts);
        else if (list && !p) each = Py_NewRef(Py_None);
        if (each) PyList_SetItem(list, row, each);
        else Py_CLEAR(list);
        free_lines(p);
    }
    PyMem_Free(found);
    PyMem_Free(versions);
    return list;
}
