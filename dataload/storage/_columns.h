/* Columns of plain memory: decimal numbers, made for all rows at once. Included by _core.c. */

#define BLOCK 128 /* rows whose memory is prefetched at once */
#define MOST_DIGITS 18 /* of an int64, whatever they are */

/* integers(out, data, offsets, lengths) -> the first row that is not 1 to 18 digits, perhaps after a minus; or -1 */
static PyObject *integers(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (wrong("integers", 4, count)) return NULL;
    Py_buffer out, data;
    if (get_buffers(args[0], &out, args[1], &data)) return NULL;
    PyObject *result = NULL;
    Ranges ranges;
    if (take_ranges(&ranges, args[2], args[3], data.len)) goto done;
    if (out.len / 8 != ranges.count || out.len % 8) {
        PyErr_Format(PyExc_ValueError, "%zd numbers do not fill %zd bytes", ranges.count, out.len);
        goto done;
    }
    Py_ssize_t row = 0;
    for (; row < ranges.count; row++) {
        const char *text = (const char *)data.buf + ranges.offsets[row];
        int negative = ranges.lengths[row] > 0 && *text == '-';
        int64_t digits = ranges.lengths[row] - negative;
        int64_t number = digits > MOST_DIGITS ? -1 : decimal(text + negative, digits);
        if (number < 0) break;
        if (negative) number = -number;
        memcpy((char *)out.buf + 8 * row, &number, 8);
    }
    result = PyLong_FromSsize_t(row < ranges.count ? row : -1);
done:
    free_ranges(&ranges);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

/* ---- Rows of one layout ---- */

#define TILE 16 /* rows whose fields are copied together, so that each column is written in whole lines */
#define MANY 256 /* rows that are, if their fields are far apart: they are in memory column after column */

typedef struct {
    char *out;
    uintptr_t data;         /* address of offset 0 */
    const int64_t *offsets; /* of rows; or their addresses */
    Py_ssize_t count;
    int64_t length; /* of a row */
    int64_t *starts, *lengths, *targets; /* of fields: in a row, and where the column begins in `out` */
    Py_ssize_t fields;
    Py_buffer first, mask; /* what rows must equal in these bits, unless `words` is NULL */
    int64_t *words;        /* offsets of 8 bytes of the mask that are not all zero */
    Py_ssize_t word_count;
    volatile Py_ssize_t *differs; /* the first row that does not, or -1 */
} Cut;

static void free_cut(Cut *cut) {
    PyMem_Free(cut->starts);
    PyMem_Free(cut->lengths);
    PyMem_Free(cut->targets);
    PyMem_Free(cut->words);
    if (cut->first.obj) PyBuffer_Release(&cut->first);
    if (cut->mask.obj) PyBuffer_Release(&cut->mask);
}

/* Take the bits that rows must have; -1 with an exception. The last of their words may overlap the one before. */
static int take_mask(Cut *cut, PyObject *first, PyObject *mask) {
    if (first == Py_None && mask == Py_None) return 0;
    if (PyObject_GetBuffer(first, &cut->first, PyBUF_SIMPLE) || PyObject_GetBuffer(mask, &cut->mask, PyBUF_SIMPLE))
        return -1;
    if (cut->length < 8 || cut->first.len != cut->length || cut->mask.len != cut->length) {
        PyErr_Format(PyExc_ValueError, "a record and a mask of %zd and %zd bytes for rows of %lld, at least 8",
                     cut->first.len, cut->mask.len, (long long)cut->length);
        return -1;
    }
    if (!(cut->words = PyMem_Malloc((cut->length / 8 + 1) * sizeof *cut->words))) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t at = 0; at < cut->length; at += 8) {
        int64_t word = at > cut->length - 8 ? cut->length - 8 : at;
        if (memcmp((const char *)cut->mask.buf + word, "\0\0\0\0\0\0\0", 8)) cut->words[cut->word_count++] = word;
    }
    return 0;
}

/* Take the arguments from `out` on: starts, lengths, targets, first, mask; -1 with an exception. To be freed in either
 * case. */
static int take_cut(Cut *cut, const Py_buffer *out, PyObject *const *args) {
    Py_ssize_t counts[2] = {0};
    cut->out = out->buf;
    if (!(cut->starts = copy_int64(args[0], &cut->fields)) || !(cut->lengths = copy_int64(args[1], &counts[0])) ||
        !(cut->targets = copy_int64(args[2], &counts[1])))
        return -1;
    if (counts[0] != cut->fields || counts[1] != cut->fields) {
        PyErr_Format(PyExc_ValueError, "%zd starts, %zd lengths and %zd targets", cut->fields, counts[0], counts[1]);
        return -1;
    }
    for (Py_ssize_t field = 0; field < cut->fields; field++) {
        int64_t start = cut->starts[field], length = cut->lengths[field], target = cut->targets[field];
        int inside = start >= 0 && length >= 0 && length <= cut->length && start <= cut->length - length;
        if (!inside || target < 0 || target > out->len || (length && cut->count > (out->len - target) / length)) {
            PyErr_Format(PyExc_ValueError, "field %zd: outside the %lld bytes of a row or the %zd bytes of columns",
                         field, (long long)cut->length, out->len);
            return -1;
        }
    }
    return take_mask(cut, args[3], args[4]);
}

static int row_differs(const Cut *c, const char *row) {
    uint64_t found, wanted, mask, differ = 0;
    for (Py_ssize_t each = 0; each < c->word_count; each++) {
        memcpy(&found, row + c->words[each], 8);
        memcpy(&wanted, (const char *)c->first.buf + c->words[each], 8);
        memcpy(&mask, (const char *)c->mask.buf + c->words[each], 8);
        differ |= (found ^ wanted) & mask;
    }
    return differ != 0;
}

static void copy_values(char *to, const char *const *from, int64_t start, int64_t length, int rows) {
    char *out[TOGETHER];
    const char *values[TOGETHER];
    int64_t lengths[TOGETHER];
    if (length <= 8 * LINE) {
        for (int row = 0; row < rows; row++) memcpy(to + row * length, from[row] + start, length);
        return;
    }
    for (int row = 0; row < rows; row += TOGETHER) {
        int few = rows - row < TOGETHER ? rows - row : TOGETHER;
        for (int each = 0; each < few; each++)
            out[each] = to + (row + each) * length, values[each] = from[row + each] + start, lengths[each] = length;
        copy_together(out, values, lengths, few);
    }
}

#define CUT_CONSTANT(BYTES) \
    case BYTES: \
        for (int row = 0; row < rows; row++) memcpy(to + row * BYTES, from[row] + start, BYTES); \
        break;

static void run_cut(const void *job) {
    const Cut *c = job;
    int64_t copied = 0, lines = (c->length + LINE - 1) / LINE;
    for (Py_ssize_t field = 0; field < c->fields; field++) copied += c->lengths[field];
    int far = !c->words && copied <= c->length / LINE, tile = far ? MANY : TILE, spread = !far && lines < c->fields;
    for (Py_ssize_t first = 0; first < c->count; first += tile) {
        int rows = c->count - first < tile ? (int)(c->count - first) : tile;
        const char *from[MANY];
        for (int row = 0; row < rows; row++) {
            from[row] = FROM(c, first + row);
            if (far) continue; /* the processor waits for many values at once */
            if (!spread && first + row + TILE < c->count && c->length > 4 * LINE)
                prefetch_row(FROM(c, first + row + TILE), c->length);
            else if (!spread && first + row + TILE < c->count)
                for (int64_t line = 0; line < lines; line++)
                    __builtin_prefetch(FROM(c, first + row + TILE) + line * LINE);
            if (row_differs(c, from[row])) {
                *c->differs = first + row;
                return;
            }
        }
        /* What many fields are in is fetched between them: memory serves only so many lines at once. */
        int64_t left = c->count - first - rows, fetched = 0, line = 0;
        int64_t ahead = spread ? (left < TILE ? left : TILE) * lines : 0;
        Py_ssize_t next = first + rows;
        for (Py_ssize_t field = 0; field < c->fields; field++) {
            for (; fetched * c->fields < ahead * (field + 1); fetched++) {
                __builtin_prefetch(FROM(c, next) + line * LINE);
                if (++line == lines) line = 0, next++;
            }
            int64_t start = c->starts[field], length = c->lengths[field];
            char *to = c->out + c->targets[field] + first * length;
            switch (length) {
                CUT_CONSTANT(1) CUT_CONSTANT(2) CUT_CONSTANT(4) CUT_CONSTANT(8) CUT_CONSTANT(64)
                default: copy_values(to, from, start, length, rows);
            }
        }
    }
}

/* cut(out, data, offsets, length, starts, lengths, targets, first, mask, file) -> the first row that differs, or -1 */
static PyObject *cut(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (wrong("cut", 10, count)) return NULL;
    volatile Py_ssize_t differs = -1;
    Cut cut = {.length = PyLong_AsLongLong(args[3]), .differs = &differs};
    File file;
    if (PyErr_Occurred() || take_file(args[9], &file)) return NULL;
    Py_buffer out, data;
    if (get_buffers(args[0], &out, args[1], &data)) return NULL;
    PyObject *result = NULL;
    int64_t *offsets = copy_int64(args[2], &cut.count);
    if (!offsets || take_cut(&cut, &out, args + 4)) goto done;
    for (Py_ssize_t row = 0; row < cut.count; row++) {
        if (cut.length < 0 || cut.length > data.len || offsets[row] < 0 || offsets[row] > data.len - cut.length) {
            outside("a record", row, data.len);
            goto done;
        }
    }
    cut.offsets = offsets, cut.data = (uintptr_t)data.buf;
    result = run_copy(module, run_cut, &cut, &data, out.len, &file);
    if (result) {
        Py_DECREF(result); /* None */
        result = PyLong_FromSsize_t(differs);
    }
done:
    free_cut(&cut);
    PyMem_Free(offsets);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}
