/* The inner loops of packing and taking apart MoldUDP64 packets. Optional: `pure.py` has the same functions in
 * Python, says what each does, and is what runs where this was not compiled. Every length read from a packet is
 * checked against the packet before it is used. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "_mac.h"

#define HEADER_BYTES 20
#define SESSION_BYTES 10
#define STAMP_BYTES 16
#define MAX_MESSAGE 0xFFFF
#define END_OF_SESSION 0xFFFF
#define MAX_SEQUENCE ((uint64_t)1 << 63)
/* Numbers of Linux's ABI; elsewhere the kernel never sends such a control message. */
#define SOL_UDP_LEVEL 17
#define UDP_GRO_KIND 104
#define NS_PER_S 1000000000

static inline uint16_t get16(const unsigned char *p) { return (uint16_t)(p[0] << 8 | p[1]); }

static inline uint64_t get64(const unsigned char *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
#if PY_LITTLE_ENDIAN
    v = __builtin_bswap64(v);
#endif
    return v;
}

static inline void put16(unsigned char *p, unsigned v)
{
    p[0] = (unsigned char)(v >> 8);
    p[1] = (unsigned char)v;
}

static inline void put64(unsigned char *p, uint64_t v)
{
#if PY_LITTLE_ENDIAN
    v = __builtin_bswap64(v);
#endif
    memcpy(p, &v, 8);
}

/* -- out ------------------------------------------------------------------------------------------------- */

static PyObject *size_range(PyObject *self, PyObject *datas)
{
    if (!PyList_CheckExact(datas) && !PyTuple_CheckExact(datas))
        Py_RETURN_NONE;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(datas);
    if (!n)
        Py_RETURN_NONE;
    PyObject **items = PySequence_Fast_ITEMS(datas);
    Py_ssize_t least = PY_SSIZE_T_MAX, most = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!PyBytes_CheckExact(items[i]))
            Py_RETURN_NONE;
        Py_ssize_t size = PyBytes_GET_SIZE(items[i]);
        if (size < least)
            least = size;
        if (size > most)
            most = size;
    }
    return Py_BuildValue("nn", least, most);
}

/* Events of one topic without keys, and what their messages have in common. */
typedef struct {
    const char *session, *head;
    Py_ssize_t session_bytes, head_bytes, start, stop;
    unsigned long long first_sequence, seq;
    PyObject *datas, *times, *column; /* `column`: times as a list or tuple, NULL if `same` is the time of all */
    long long same;
} Run;

static int open_run(Run *run)
{
    run->column = NULL;
    if (run->session_bytes != SESSION_BYTES || run->head_bytes > MAX_MESSAGE - STAMP_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a session has 10 bytes, a head less than 65,519");
        return -1;
    }
    if (!PyList_CheckExact(run->datas) && !PyTuple_CheckExact(run->datas)) {
        PyErr_SetString(PyExc_TypeError, "datas must be a list or tuple");
        return -1;
    }
    if (run->start < 0 || run->start >= run->stop || run->stop > PySequence_Fast_GET_SIZE(run->datas)) {
        PyErr_SetString(PyExc_ValueError, "start and stop do not fit the datas");
        return -1;
    }
    if (PyLong_Check(run->times)) {
        run->same = PyLong_AsLongLong(run->times);
        return run->same == -1 && PyErr_Occurred() ? -1 : 0;
    }
    run->column = PySequence_Fast(run->times, "times must be an int or a sequence of them");
    if (run->column == NULL)
        return -1;
    if (run->stop > PySequence_Fast_GET_SIZE(run->column)) {
        PyErr_SetString(PyExc_ValueError, "fewer times than datas");
        Py_CLEAR(run->column);
        return -1;
    }
    return 0;
}

/* The size of message `i`, or -1 with an error. */
static Py_ssize_t message_bytes(const Run *run, Py_ssize_t i)
{
    PyObject *data = PySequence_Fast_GET_ITEM(run->datas, i);
    if (!PyBytes_CheckExact(data)) {
        PyErr_SetString(PyExc_TypeError, "data must be bytes");
        return -1;
    }
    Py_ssize_t size = run->head_bytes + STAMP_BYTES + PyBytes_GET_SIZE(data);
    if (size > MAX_MESSAGE) {
        PyErr_SetString(PyExc_ValueError, "a message has at most 65,535 bytes");
        return -1;
    }
    return size;
}

static unsigned char *write_header(unsigned char *at, const Run *run, Py_ssize_t i, Py_ssize_t count)
{
    memcpy(at, run->session, SESSION_BYTES);
    put64(at + SESSION_BYTES, run->first_sequence + (uint64_t)(i - run->start));
    put16(at + SESSION_BYTES + 8, (unsigned)count);
    return at + HEADER_BYTES;
}

/* Write message `i` of `size` bytes; NULL with an error if its time is not a number of 64 bits. */
static unsigned char *write_block(unsigned char *at, const Run *run, Py_ssize_t i, Py_ssize_t size)
{
    long long time = run->same;
    if (run->column != NULL) {
        PyObject *number = PySequence_Fast_GET_ITEM(run->column, i);
        if (!PyLong_Check(number)) { /* nothing here may call back: the lists must stay as they are */
            PyErr_SetString(PyExc_TypeError, "a time must be an int");
            return NULL;
        }
        time = PyLong_AsLongLong(number);
        if (time == -1 && PyErr_Occurred())
            return NULL;
    }
    PyObject *data = PySequence_Fast_GET_ITEM(run->datas, i);
    put16(at, (unsigned)size);
    memcpy(at + 2, run->head, (size_t)run->head_bytes);
    at += 2 + run->head_bytes;
    put64(at, run->seq + (uint64_t)(i - run->start));
    put64(at + 8, (uint64_t)time);
    memcpy(at + STAMP_BYTES, PyBytes_AS_STRING(data), (size_t)PyBytes_GET_SIZE(data));
    return at + STAMP_BYTES + PyBytes_GET_SIZE(data);
}

static PyObject *pack_gso_batch(PyObject *self, PyObject *args)
{
    Run run;
    Py_ssize_t per_packet;
    if (!PyArg_ParseTuple(args, "y#Ky#KOOnnn", &run.session, &run.session_bytes, &run.first_sequence, &run.head,
                          &run.head_bytes, &run.seq, &run.times, &run.datas, &run.start, &run.stop, &per_packet))
        return NULL;
    if (open_run(&run) < 0)
        return NULL;
    PyObject *batch = NULL;
    Py_ssize_t size = message_bytes(&run, run.start), total = run.stop - run.start;
    if (size < 0)
        goto failed;
    if (per_packet < 1 || per_packet >= END_OF_SESSION) {
        PyErr_SetString(PyExc_ValueError, "a packet has 1 to 65,534 messages");
        goto failed;
    }
    batch = PyBytes_FromStringAndSize(NULL, (total + per_packet - 1) / per_packet * HEADER_BYTES + total * (2 + size));
    if (batch == NULL)
        goto failed;
    unsigned char *at = (unsigned char *)PyBytes_AS_STRING(batch);
    for (Py_ssize_t i = run.start; i < run.stop;) {
        Py_ssize_t end = run.stop - i > per_packet ? i + per_packet : run.stop;
        at = write_header(at, &run, i, end - i);
        for (; i < end; i++) {
            Py_ssize_t this = message_bytes(&run, i);
            if (this >= 0 && this != size)
                PyErr_SetString(PyExc_ValueError, "messages of a batch have one size");
            if (this != size || (at = write_block(at, &run, i, size)) == NULL) {
                Py_CLEAR(batch);
                goto failed;
            }
        }
    }
failed:
    Py_XDECREF(run.column);
    return batch;
}

static PyObject *pack_packets(PyObject *self, PyObject *args)
{
    Run run;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "y#Ky#KOOnnn", &run.session, &run.session_bytes, &run.first_sequence, &run.head,
                          &run.head_bytes, &run.seq, &run.times, &run.datas, &run.start, &run.stop, &limit))
        return NULL;
    if (open_run(&run) < 0)
        return NULL;
    PyObject *packets = PyList_New(0);
    for (Py_ssize_t i = run.start; packets != NULL && i < run.stop;) {
        Py_ssize_t end = i, bytes = HEADER_BYTES;
        for (; end < run.stop && end - i < END_OF_SESSION - 1; end++) {
            Py_ssize_t size = message_bytes(&run, end);
            if (size < 0) {
                Py_CLEAR(packets);
                break;
            }
            if (end > i && bytes + 2 + size > limit)
                break;
            bytes += 2 + size;
        }
        PyObject *packet = packets == NULL ? NULL : PyBytes_FromStringAndSize(NULL, bytes);
        if (packet == NULL) {
            Py_CLEAR(packets);
            break;
        }
        unsigned char *at = write_header((unsigned char *)PyBytes_AS_STRING(packet), &run, i, end - i);
        while (at != NULL && i < end) {
            at = write_block(at, &run, i, message_bytes(&run, i));
            i++;
        }
        if (at == NULL || PyList_Append(packets, packet) < 0)
            Py_CLEAR(packets);
        Py_DECREF(packet);
    }
    Py_XDECREF(run.column);
    return packets;
}

/* What comes alone is small; anything larger goes the general way. */
#define LONE_BYTES 2048

/* Nothing is allocated, and the interpreter lock is kept: whoever waits for the event waits for this. */
static PyObject *send_lone(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 7 || !PyList_CheckExact(args[0]) || !PyBytes_CheckExact(args[1]) || !PyBytes_CheckExact(args[3]) ||
        !PyBytes_CheckExact(args[6]) || PyBytes_GET_SIZE(args[1]) != SESSION_BYTES) {
        PyErr_SetString(PyExc_TypeError, "send_lone(descriptors, session, sequence, head, seq, time, data)");
        return NULL;
    }
    unsigned char packet[LONE_BYTES], *at = packet;
    size_t head = (size_t)PyBytes_GET_SIZE(args[3]), data = (size_t)PyBytes_GET_SIZE(args[6]);
    size_t block = head + STAMP_BYTES + data;
    unsigned long long sequence = PyLong_AsUnsignedLongLong(args[2]), seq = PyLong_AsUnsignedLongLong(args[4]);
    long long time = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred())
        return NULL;
    if (head > LONE_BYTES || data > LONE_BYTES || HEADER_BYTES + 2 + block > LONE_BYTES)
        return PyLong_FromLong(0);
    memcpy(at, PyBytes_AS_STRING(args[1]), SESSION_BYTES);
    put64(at + SESSION_BYTES, sequence);
    put16(at + SESSION_BYTES + 8, 1);
    put16(at + HEADER_BYTES, (unsigned)block);
    at += HEADER_BYTES + 2;
    memcpy(at, PyBytes_AS_STRING(args[3]), head);
    put64(at + head, seq);
    put64(at + head + 8, (uint64_t)time);
    memcpy(at + head + STAMP_BYTES, PyBytes_AS_STRING(args[6]), data);
    Py_ssize_t sent = 0;
    for (; sent < PyList_GET_SIZE(args[0]); sent++) {
        int fd = PyObject_AsFileDescriptor(PyList_GET_ITEM(args[0], sent));
        if (fd < 0 || send(fd, packet, HEADER_BYTES + 2 + block, MSG_DONTWAIT) < 0)
            break; /* there is no room, or something is wrong with it: the general way waits, or says what */
    }
    PyErr_Clear();
    return PyLong_FromSsize_t(sent);
}

/* -- in -------------------------------------------------------------------------------------------------- */

static PyObject *gso_batch_header(PyObject *self, PyObject *args)
{
    Py_buffer batch;
    Py_ssize_t packet_bytes;
    if (!PyArg_ParseTuple(args, "y*n", &batch, &packet_bytes))
        return NULL;
    PyObject *result = NULL;
    if (packet_bytes < HEADER_BYTES || batch.len < packet_bytes || batch.len % packet_bytes)
        goto no;
    const unsigned char *p = batch.buf;
    uint64_t packets = (uint64_t)(batch.len / packet_bytes), first = get64(p + SESSION_BYTES);
    uint16_t count = get16(p + SESSION_BYTES + 8);
    if (count == 0 || count == END_OF_SESSION || first == 0 || first >= MAX_SEQUENCE ||
        packets * count > MAX_SEQUENCE - first)
        goto no;
    for (uint64_t i = 1; i < packets; i++) {
        const unsigned char *q = p + i * (uint64_t)packet_bytes;
        if (memcmp(p, q, SESSION_BYTES) || get64(q + SESSION_BYTES) != first + i * count ||
            get16(q + SESSION_BYTES + 8) != count)
            goto no;
    }
    result = Py_BuildValue("y#KH", p, (Py_ssize_t)SESSION_BYTES, (unsigned long long)first, count);
    PyBuffer_Release(&batch);
    return result;
no:
    PyBuffer_Release(&batch);
    Py_RETURN_NONE;
}

/* Give `list` its `i`th number: the one before it again if it is equal, as times often are. */
static int set_number(PyObject *list, Py_ssize_t i, int64_t value, int64_t before)
{
    PyObject *number;
    if (i && value == before)
        number = Py_NewRef(PyList_GET_ITEM(list, i - 1));
    else if ((number = PyLong_FromLongLong(value)) == NULL)
        return -1;
    PyList_SET_ITEM(list, i, number);
    return 0;
}

/* Numbers that follow one another are a range: nothing is made for each. */
static PyObject *sequence_of(const uint64_t *numbers, Py_ssize_t n)
{
    int in_order = numbers[0] < MAX_SEQUENCE;
    for (Py_ssize_t i = 1; in_order && i < n; i++)
        in_order = numbers[i] == numbers[0] + (uint64_t)i;
    if (in_order)
        return PyObject_CallFunction((PyObject *)&PyRange_Type, "KK", (unsigned long long)numbers[0],
                                     (unsigned long long)(numbers[0] + (uint64_t)n));
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}

static PyObject *unpack(PyObject *self, PyObject *args)
{
    Py_buffer batch, head;
    Py_ssize_t packet_bytes, count, key_bytes;
    if (!PyArg_ParseTuple(args, "y*nny*n", &batch, &packet_bytes, &count, &head, &key_bytes))
        return NULL;
    PyObject *times = NULL, *keys = NULL, *datas = NULL, *seqs = NULL, *result = NULL;
    uint64_t *numbers = NULL;
    Py_ssize_t least = head.len + STAMP_BYTES + key_bytes;
    if (packet_bytes < HEADER_BYTES || batch.len < packet_bytes || batch.len % packet_bytes || key_bytes < 0 ||
        key_bytes > MAX_MESSAGE || count < 1 || count > (packet_bytes - HEADER_BYTES) / (2 + least) ||
        memcmp((const char *)batch.buf + HEADER_BYTES + 2, head.buf, (size_t)head.len))
        goto none; /* nothing is allocated that the packets cannot fill, or for messages of another kind */
    Py_ssize_t total = batch.len / packet_bytes * count, i = 0;
    int64_t before = 0;
    if ((numbers = PyMem_New(uint64_t, total)) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if ((times = PyList_New(total)) == NULL || (datas = PyList_New(total)) == NULL ||
        (keys = PyList_New(key_bytes ? total : 0)) == NULL)
        goto done;
    const unsigned char *packet = batch.buf, *stop = packet + batch.len;
    for (; packet < stop; packet += packet_bytes) {
        const unsigned char *at = packet + HEADER_BYTES, *end = packet + packet_bytes;
        for (Py_ssize_t k = 0; k < count; k++, i++) {
            if (end - at < 2)
                goto none;
            Py_ssize_t size = get16(at);
            at += 2;
            if (size < least || end - at < size || memcmp(at, head.buf, (size_t)head.len))
                goto none;
            const unsigned char *stamp = at + head.len, *key = stamp + STAMP_BYTES;
            numbers[i] = get64(stamp);
            int64_t time = (int64_t)get64(stamp + 8);
            if (set_number(times, i, time, before) < 0)
                goto done;
            before = time;
            if (key_bytes) {
                PyObject *text = PyUnicode_DecodeUTF8((const char *)key, key_bytes, NULL);
                if (text == NULL) {
                    if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
                        goto done;
                    PyErr_Clear();
                    goto none;
                }
                PyList_SET_ITEM(keys, i, text);
            }
            PyObject *data = PyBytes_FromStringAndSize((const char *)key + key_bytes, size - least);
            if (data == NULL)
                goto done;
            PyList_SET_ITEM(datas, i, data);
            at += size;
        }
    }
    if ((seqs = sequence_of(numbers, total)) != NULL)
        result = PyTuple_Pack(4, seqs, times, keys, datas);
    goto done;
none:
    result = Py_NewRef(Py_None);
done:
    PyMem_Free(numbers);
    Py_XDECREF(seqs);
    Py_XDECREF(times);
    Py_XDECREF(keys);
    Py_XDECREF(datas);
    PyBuffer_Release(&batch);
    PyBuffer_Release(&head);
    return result;
}

/* One datagram, or GSO batch; its length, or -1 if none is there. `packet_bytes` is the size of one datagram in it. */
static Py_ssize_t receive_one(int fd, Py_buffer *into, Py_ssize_t *packet_bytes)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {into->buf, (size_t)into->len};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    Py_ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT); /* the interpreter lock is kept: this does not wait */
    *packet_bytes = size > 0 ? size : 1;
    struct cmsghdr *said = size < 0 ? NULL : CMSG_FIRSTHDR(&message);
    if (said != NULL && said->cmsg_level == SOL_UDP_LEVEL && said->cmsg_type == UDP_GRO_KIND) {
        int segment;
        memcpy(&segment, CMSG_DATA(said), sizeof segment);
        if (segment > 0 && segment < size)
            *packet_bytes = segment;
    }
    return size;
}

static int64_t monotonic_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * NS_PER_S + t.tv_nsec;
}

/* What is waited for, and what was read. */
typedef struct {
    struct pollfd *watched; /* `lines` sockets, then other descriptors */
    int *own;               /* of each socket a descriptor of our own, while it is looked at without a pause */
    Py_ssize_t lines, n, line, size, packet_bytes;
    Py_buffer into;
} Wait;

/* One datagram (or GSO batch) of that socket; whether there was one. */
static int read_line(Wait *wait, Py_ssize_t line, int fd)
{
    wait->size = receive_one(fd, &wait->into, &wait->packet_bytes);
    wait->line = line;
    return wait->size >= 0;
}

/* Look at the sockets again and again, for a millisecond at most: 1 when one was read, or something else is ready. */
static int spin(Wait *wait, int64_t now, int64_t end)
{
    if (end > now + NS_PER_S / 1000)
        end = now + NS_PER_S / 1000;
    for (unsigned i = 1;; i++) {
        for (Py_ssize_t line = 0; line < wait->lines; line++)
            if (wait->own[line] >= 0 && read_line(wait, line, wait->own[line]))
                return 1;
        if (i % 8)
            continue;
        int ready = poll(wait->watched + wait->lines, (nfds_t)(wait->n - wait->lines), 0);
        if (ready || monotonic_ns() >= end)
            return ready;
    }
}

/* Sleep until one of them is ready, `end` or a signal. */
static int sleep_until(Wait *wait, int64_t now, int64_t end)
{
    int64_t left = end > now ? end - now : 0;
    struct timespec t = {.tv_sec = left / NS_PER_S, .tv_nsec = left % NS_PER_S};
    return ppoll(wait->watched, (nfds_t)wait->n, &t, NULL);
}

/* Read the first socket that is ready. It is asked for its descriptor again, because another thread may have closed it
 * while this one waited. */
static int read_ready(Wait *wait, PyObject *socks)
{
    for (Py_ssize_t line = 0; line < wait->lines; line++) {
        if (!wait->watched[line].revents)
            continue;
        int fd = PyObject_AsFileDescriptor(PyTuple_GET_ITEM(socks, line));
        if (fd < 0)
            PyErr_Clear();
        if (fd == wait->watched[line].fd && read_line(wait, line, fd))
            return 1;
    }
    return 0;
}

/* A tuple of these, which it takes over; NULL if one of them is. */
static PyObject *tuple_of(Py_ssize_t n, PyObject *const *items)
{
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (tuple != NULL && items[i] != NULL) {
            PyTuple_SET_ITEM(tuple, i, items[i]);
            continue;
        }
        Py_XDECREF(items[i]);
        Py_CLEAR(tuple);
    }
    return tuple;
}

/* What was read, and its message if it is the packet that was expected. */
static PyObject *describe_found(const Wait *wait, Py_ssize_t session_bytes, const char *session, uint64_t expected,
                                Py_ssize_t head_bytes, const char *head)
{
    const unsigned char *p = wait->into.buf, *block = p + HEADER_BYTES + 2, *stamp = block + head_bytes;
    Py_ssize_t size = wait->size, rest = size - (stamp + STAMP_BYTES - p);
    PyObject *message;
    if (rest >= 0 && wait->packet_bytes == size && session_bytes == SESSION_BYTES && head_bytes > 0 && expected > 0 &&
        expected < MAX_SEQUENCE && get64(p + SESSION_BYTES) == expected && get16(p + SESSION_BYTES + 8) == 1 &&
        get16(p + HEADER_BYTES) == (size_t)(p + size - block) && !memcmp(p, session, SESSION_BYTES) &&
        !memcmp(block, head, (size_t)head_bytes) && get64(stamp) < MAX_SEQUENCE) {
        PyObject *parts[] = {PyLong_FromUnsignedLongLong(get64(stamp)), PyLong_FromLongLong((int64_t)get64(stamp + 8)),
                             PyBytes_FromStringAndSize((const char *)stamp + STAMP_BYTES, rest)};
        message = tuple_of(3, parts);
    } else {
        message = Py_NewRef(Py_None);
    }
    PyObject *parts[] = {PyLong_FromSsize_t(wait->line), PyLong_FromSsize_t(size),
                         PyLong_FromSsize_t(wait->packet_bytes), message};
    return tuple_of(4, parts);
}

/* Other threads may close a socket meanwhile, and its descriptor be somebody else's then: hence our own. */
static int open_wait(Wait *wait, PyObject *socks, PyObject *others, int spins)
{
    wait->lines = PyTuple_GET_SIZE(socks);
    wait->n = wait->lines + PyTuple_GET_SIZE(others);
    wait->own = PyMem_New(int, wait->lines);
    wait->watched = PyMem_New(struct pollfd, wait->n);
    for (Py_ssize_t i = 0; wait->own != NULL && i < wait->lines; i++)
        wait->own[i] = -1;
    if (wait->own == NULL || wait->watched == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < wait->n; i++) {
        PyObject *one = i < wait->lines ? PyTuple_GET_ITEM(socks, i) : PyTuple_GET_ITEM(others, i - wait->lines);
        int fd = PyObject_AsFileDescriptor(one);
        wait->watched[i] = (struct pollfd){.fd = fd, .events = POLLIN};
        if (spins && fd >= 0 && i < wait->lines)
            wait->own[i] = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        PyErr_Clear(); /* closed meanwhile: poll passes over a negative one */
    }
    return 0;
}

static void close_wait(Wait *wait)
{
    for (Py_ssize_t i = 0; wait->own != NULL && i < wait->lines; i++)
        if (wait->own[i] >= 0)
            close(wait->own[i]);
    PyMem_Free(wait->own);
    PyMem_Free(wait->watched);
    PyBuffer_Release(&wait->into);
}

static PyObject *wait_next(PyObject *self, PyObject *args)
{
    PyObject *socks, *others, *result = NULL;
    Wait wait = {0};
    const char *session, *head;
    Py_ssize_t session_bytes, head_bytes;
    long long wait_ns, spin_ns;
    unsigned long long expected;
    if (!PyArg_ParseTuple(args, "O!O!LLw*y#Ky#", &PyTuple_Type, &socks, &PyTuple_Type, &others, &wait_ns, &spin_ns,
                          &wait.into, &session, &session_bytes, &expected, &head, &head_bytes))
        return NULL;
    if (open_wait(&wait, socks, others, spin_ns > 0) < 0)
        goto done;
    int64_t now = monotonic_ns(), end = now + wait_ns, spin_end = spin_ns < wait_ns ? now + spin_ns : end;
    for (;;) {
        int ready, spins = now < spin_end;
        wait.size = -1;
        Py_BEGIN_ALLOW_THREADS
        ready = spins ? spin(&wait, now, spin_end) : sleep_until(&wait, now, end);
        Py_END_ALLOW_THREADS
        if (ready > 0) {
            if (wait.size >= 0 || (!spins && read_ready(&wait, socks)))
                result = describe_found(&wait, session_bytes, session, expected, head_bytes, head);
            else
                result = Py_NewRef(Py_None);
            goto done;
        }
        if (ready < 0 && errno != EINTR) {
            PyErr_SetFromErrno(PyExc_OSError);
            goto done;
        }
        if (PyErr_CheckSignals() < 0)
            goto done;
        if ((now = monotonic_ns()) >= end)
            break;
    }
    result = Py_NewRef(Py_None);
done:
    close_wait(&wait);
    return result;
}

/* -- authentication -------------------------------------------------------------------------------------- */

#define TRAILER_PREFIX_BYTES 22
#define TRAILER_BYTES (TRAILER_PREFIX_BYTES + MAC_TAG_BYTES)

static PyObject *mac_key(PyObject *self, PyObject *args)
{
    Py_buffer key;
    int least = 0;
    if (!PyArg_ParseTuple(args, "y*|i", &key, &least))
        return NULL;
    MacKey prepared;
    PyObject *out = NULL;
    memset(&prepared, 0, sizeof prepared);
    if (key.len < 1 || key.len > MAC_KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a key has 1 to 32 bytes");
    } else {
        mac_prepare(&prepared, key.buf, (size_t)key.len, least);
        out = PyBytes_FromStringAndSize((const char *)&prepared, sizeof prepared);
    }
    PyBuffer_Release(&key);
    return out;
}

static int open_key(MacKey *key, Py_buffer *raw)
{
    if (raw->len != sizeof *key) {
        PyErr_SetString(PyExc_ValueError, "not a key of mac_key");
        return -1;
    }
    memcpy(key, raw->buf, sizeof *key);
    return 0;
}

/* How many packets of `size` bytes to do at once; the last one of a batch, if it is shorter, alone. */
static inline int at_once(Py_ssize_t left, Py_ssize_t size)
{
    Py_ssize_t whole = left / size;
    return whole > MAC_LANES ? MAC_LANES : whole < 1 ? 1 : (int)whole;
}

static PyObject *sign_packets(PyObject *self, PyObject *args)
{
    Py_buffer raw, in;
    Py_ssize_t packet_bytes;
    unsigned long long signer, time;
    if (!PyArg_ParseTuple(args, "y*y*nKK", &raw, &in, &packet_bytes, &signer, &time))
        return NULL;
    PyObject *out = NULL;
    MacKey key;
    if (open_key(&key, &raw) < 0)
        goto done;
    if (packet_bytes < 1 || in.len < 1) {
        PyErr_SetString(PyExc_ValueError, "a packet has at least one byte");
        goto done;
    }
    Py_ssize_t packets = (in.len - 1) / packet_bytes + 1;
    if (packets > (PY_SSIZE_T_MAX - in.len) / TRAILER_BYTES) {
        PyErr_NoMemory();
        goto done;
    }
    if ((out = PyBytes_FromStringAndSize(NULL, in.len + packets * TRAILER_BYTES)) == NULL)
        goto done;
    unsigned char *to = (unsigned char *)PyBytes_AS_STRING(out);
    const unsigned char *from = in.buf;
    for (Py_ssize_t left = in.len; left > 0;) {
        int n = at_once(left, packet_bytes);
        Py_ssize_t size = left < packet_bytes ? left : packet_bytes;
        unsigned char tags[MAC_LANES][MAC_TAG_BYTES];
        for (int k = 0; k < n; k++) {
            unsigned char *packet = to + k * (size + TRAILER_BYTES);
            memcpy(packet, from + k * size, (size_t)size);
            put16(packet + size, TRAILER_BYTES - 2);
            memcpy(packet + size + 2, "BLh3", 4);
            put64(packet + size + 6, signer);
            put64(packet + size + 14, time++);
        }
        mac_tags(&key, to, size + TRAILER_BYTES, (size_t)size + TRAILER_PREFIX_BYTES, n, tags);
        for (int k = 0; k < n; k++, to += size + TRAILER_BYTES)
            memcpy(to + size + TRAILER_PREFIX_BYTES, tags[k], MAC_TAG_BYTES);
        from += n * size;
        left -= n * size;
    }
done:
    PyBuffer_Release(&raw);
    PyBuffer_Release(&in);
    return out;
}

static PyObject *verify_packets(PyObject *self, PyObject *args)
{
    Py_buffer raw, batch;
    Py_ssize_t packet_bytes;
    if (!PyArg_ParseTuple(args, "y*y*n", &raw, &batch, &packet_bytes))
        return NULL;
    PyObject *result = NULL;
    MacKey key;
    if (open_key(&key, &raw) < 0)
        goto done;
    int good = packet_bytes > TRAILER_BYTES && batch.len >= packet_bytes && batch.len % packet_bytes == 0;
    const unsigned char *p = batch.buf;
    for (Py_ssize_t at = 0; good && at < batch.len;) {
        int n = at_once(batch.len - at, packet_bytes);
        unsigned char tags[MAC_LANES][MAC_TAG_BYTES], different = 0;
        mac_tags(&key, p + at, packet_bytes, (size_t)packet_bytes - MAC_TAG_BYTES, n, tags);
        for (int k = 0; k < n; k++, at += packet_bytes) {
            const unsigned char *trailer = p + at + packet_bytes - TRAILER_BYTES;
            different |= get16(trailer) != TRAILER_BYTES - 2 || memcmp(trailer + 2, "BLh3", 4);
            for (int i = 0; i < MAC_TAG_BYTES; i++) /* all of them, whatever the first one says */
                different |= tags[k][i] ^ trailer[TRAILER_PREFIX_BYTES + i];
        }
        good = !different;
    }
    result = PyBool_FromLong(good);
done:
    PyBuffer_Release(&raw);
    PyBuffer_Release(&batch);
    return result;
}

static PyMethodDef methods[] = {
    {"size_range", size_range, METH_O, NULL},
    {"pack_gso_batch", pack_gso_batch, METH_VARARGS, NULL},
    {"pack_packets", pack_packets, METH_VARARGS, NULL},
    {"send_lone", (PyCFunction)(void (*)(void))send_lone, METH_FASTCALL, NULL},
    {"gso_batch_header", gso_batch_header, METH_VARARGS, NULL},
    {"unpack", unpack, METH_VARARGS, NULL},
    {"wait_next", wait_next, METH_VARARGS, NULL},
    {"mac_key", mac_key, METH_VARARGS, NULL},
    {"sign_packets", sign_packets, METH_VARARGS, NULL},
    {"verify_packets", verify_packets, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_speed", "The inner loops of multicast; see pure.py.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__speed(void) { return PyModuleDef_Init(&module); }
