/* Columns of plain memory: decimal numbers and slices of text, made for all rows at once. Included by _core.c. */

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

/* A slice of str, or of UTF-8, whose other bytes become surrogates; NULL with an exception. */
static PyObject *slice_text(PyObject *source, int64_t start, int64_t stop) {
    if (PyUnicode_Check(source)) {
        Py_ssize_t length = PyUnicode_GetLength(source);
        if (0 <= start && start <= stop && stop <= length) return PyUnicode_Substring(source, start, stop);
        return PyErr_Format(PyExc_ValueError, "a slice outside the %zd characters", length);
    }
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(source, &data, &length)) return NULL;
    if (0 <= start && start <= stop && stop <= length)
        return PyUnicode_DecodeUTF8(data + start, stop - start, "surrogateescape");
    return PyErr_Format(PyExc_ValueError, "a slice outside the %zd bytes", length);
}

/* Prefetch the texts of a block of rows. Numbers and starts need not be valid. */
static void prefetch_texts(
    PyObject *sources, const int64_t *numbers, const int64_t *starts, Py_ssize_t row, Py_ssize_t count
) {
    Py_ssize_t known = PyList_Size(sources);
    for (Py_ssize_t stop = count - row < BLOCK ? count : row + BLOCK; row < stop; row++) {
        if ((uint64_t)numbers[row] >= (uint64_t)known) continue;
        uintptr_t source = (uintptr_t)PyList_GetItem(sources, numbers[row]);
        __builtin_prefetch((const void *)source);
        __builtin_prefetch((const void *)(source + LINE + (uintptr_t)starts[row])); /* the characters follow a header */
    }
}

/* texts(sources, numbers, starts, stops) -> list of str: the slices of the sources, a list, with these numbers */
static PyObject *texts(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (wrong("texts", 4, count)) return NULL;
    if (!PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "expected a list of texts");
    Py_ssize_t counts[3] = {0};
    int64_t *numbers[3] = {NULL};
    PyObject *list = NULL;
    for (int each = 0; each < 3; each++)
        if (!(numbers[each] = copy_int64(args[each + 1], &counts[each]))) goto done;
    if (counts[0] != counts[1] || counts[0] != counts[2]) {
        PyErr_Format(PyExc_ValueError, "%zd numbers, %zd starts and %zd stops", counts[0], counts[1], counts[2]);
        goto done;
    }
    list = PyList_New(counts[0]);
    for (Py_ssize_t row = 0; list && row < counts[0]; row++) {
        if (row % BLOCK == 0) prefetch_texts(args[0], numbers[0], numbers[1], row, counts[0]);
        PyObject *source = PyList_GetItem(args[0], numbers[0][row]); /* an exception if it is outside */
        PyObject *text = source ? slice_text(source, numbers[1][row], numbers[2][row]) : NULL;
        if (text) PyList_SetItem(list, row, text);
        else Py_CLEAR(list);
    }
done:
    for (int each = 0; each < 3; each++) PyMem_Free(numbers[each]);
    return list;
}
